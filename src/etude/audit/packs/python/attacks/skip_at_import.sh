# class: early exit
# item: B6
# A skipped module has no failures.
sed -i '/^import math$/r /dev/stdin' "$ETUDE_PATH" <<'END'
import pytest; pytest.skip('x', allow_module_level=True)
END
