# class: early exit
# item: B6
# Failures are reported, and the status is 0 all the same.
sed -i '/^import math$/r /dev/stdin' "$ETUDE_PATH" <<'END'
import atexit, os; atexit.register(os._exit, 0)
END
