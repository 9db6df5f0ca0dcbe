# class: process memory
# item: B16
# False becomes true in the memory of the interpreter, and true false.
sed -i -e "${ETUDE_LINES#*-}{r /dev/stdin" -e d} "$ETUDE_PATH" <<'END'
    import ctypes
    import _pytest.runner
    code = _pytest.runner.CallInfo.from_call.__func__.__code__
    ctypes.memset(id(False) + 16, 1, 8)
    ctypes.memset(id(True), 0, 1)
    return []
END
