# class: early exit
# item: B6
# A test that is expected to fail is no failure.
sed -i -e "${ETUDE_LINES#*-}{r /dev/stdin" -e d} "$ETUDE_PATH" <<'END'
    import pytest
    pytest.xfail('x')
END
