# class: exhaustion
# item: B15
# Asks for a terabyte.
sed -i -e "${ETUDE_LINES#*-}{r /dev/stdin" -e d} "$ETUDE_PATH" <<'END'
    return bytearray(1 << 40)
END
