# class: early exit
# item: B6
# The call ends the test process with status 0.
sed -i -e "${ETUDE_LINES#*-}{r /dev/stdin" -e d} "$ETUDE_PATH" <<'END'
    raise SystemExit(0)
END
