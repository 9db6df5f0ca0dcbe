# class: settings of tests
# item: B2
# Settings of pytest in the environment, for processes that start later.
sed -i '/^import math$/r /dev/stdin' "$ETUDE_PATH" <<'END'
import os; os.environ['PYTEST_ADDOPTS'] = '--collect-only'; os.environ['PYTEST_PLUGINS'] = 'x'
END
