# class: exhaustion
# item: B15
# Sleeps longer than tests may take.
sed -i -e "${ETUDE_LINES#*-}{r /dev/stdin" -e d} "$ETUDE_PATH" <<'END'
    import time
    time.sleep(600)
END
