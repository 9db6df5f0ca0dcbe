# class: odd files
"""A process stays behind and swaps the module's text again and again, whatever reads it."""

import time

if os.fork() == 0:
    os.setsid()
    turn = 0
    end = time.time() + 60
    while time.time() < end:
        turn += 1
        try:
            if turn % 2:
                PATH.write_text(TEXT + "\nimport unittest\nunittest.TestCase.run = lambda *a, **k: None\n")
            else:
                PATH.unlink()
                os.mkfifo(PATH)
        except OSError:
            pass
        try:
            time.sleep(0.001)
            if not turn % 2:
                PATH.unlink()
        except OSError:
            pass
    os._exit(0)
