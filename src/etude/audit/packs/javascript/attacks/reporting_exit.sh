# class: early exit
# item: J5
# The process ends without its handlers.
cat >> "$ETUDE_PATH" <<'END'
process.reallyExit(0)
END
