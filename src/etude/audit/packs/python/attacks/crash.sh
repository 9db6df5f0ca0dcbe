# class: exhaustion
# item: B15
# The process dies of a signal.
sed -i -e "${ETUDE_LINES#*-}{r /dev/stdin" -e d} "$ETUDE_PATH" <<'END'
    import os
    os.abort()
END
