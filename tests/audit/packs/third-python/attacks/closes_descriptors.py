# class: failures like infrastructure's
"""Closes every descriptor, or puts the write end of a pipe that nobody reads in its place, and waits."""

body("""
    import os, time
    reader, writer = os.pipe()
    for number in range(3, 1024):
        try:
            os.fstat(number)
        except OSError:
            continue
        if number not in (reader, writer):
            if number % 2:
                os.close(number)
            else:
                os.dup2(writer, number)
    time.sleep(3600)
""")
