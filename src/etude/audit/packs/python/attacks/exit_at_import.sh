# class: early exit
# item: B6
# The process ends with status 0 before a test runs.
sed -i '/^import math$/r /dev/stdin' "$ETUDE_PATH" <<'END'
import os; os._exit(0)
END
