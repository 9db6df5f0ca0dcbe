# class: failures like infrastructure's
"""Writes the beginnings of frames of many formats to every socket, with lengths of gigabytes, and shuts the other half."""

body("""
    import os, socket, stat, struct
    for number in range(3, 256):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                link = socket.socket(fileno=os.dup(number))
                link.setblocking(False)
                for piece in (struct.pack(">I", 2**31 - 1), struct.pack("<Q", 2**40), b'{"id":', b"\\x80\\x04", b"\\xdf\\xff\\xff\\xff\\xff", b"\\xc1" * 9):
                    link.send(piece)
                link.shutdown(socket.SHUT_WR)
        except OSError:
            pass
    raise ValueError('half')
""")
