# class: forged results
# item: B10
# The report that the runner writes, on every descriptor; then the end.
sed -i -e "${ETUDE_LINES#*-}{r /dev/stdin" -e d} "$ETUDE_PATH" <<'END'
    import json, os, sys
    frame, asked = sys._getframe(), []
    while frame is not None:
        asked = frame.f_locals.get("tests") or asked
        frame = frame.f_back
    lines = "".join(json.dumps({"test": n, "outcome": "passed", "message": ""}) + chr(10) for n in set(asked))
    for fd in range(3, 60):
        try: os.write(fd, (lines + json.dumps({"end": 1}) + chr(10)).encode())
        except OSError: pass
    os._exit(0)
END
