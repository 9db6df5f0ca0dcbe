# class: early exit
# item: B6
# A skipped test is no failure.
sed -i -e "${ETUDE_LINES#*-}{r /dev/stdin" -e d} "$ETUDE_PATH" <<'END'
    import pytest
    pytest.skip('x')
END
