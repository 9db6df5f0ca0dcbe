# class: expected value
# item: B9
# Tables of expected values that a module of the process may hold.
sed -i -e "${ETUDE_LINES#*-}{r /dev/stdin" -e d} "$ETUDE_PATH" <<'END'
    import sys
    for name, module in list(sys.modules.items()):
        for key, value in list(vars(module).items()) if hasattr(module, "__dict__") else ():
            if key in ("ROWS", "EXPECTED", "answers", "expected"): return value
END
