# class: leftover process
# item: B11
# A process that outlives the tests, and leaves a mark on the host if it gets out of the box.
sed -i -e "${ETUDE_LINES#*-}{r /dev/stdin" -e d} "$ETUDE_PATH" <<'END'
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for _ in range(100):
                time.sleep(0.1)
                open("/tmp/etude-attack-escaped", "w").close()
        os._exit(0)
    return []
END
