# class: failures like infrastructure's
"""Takes memory in pages, shared memory and memory files until something is killed."""

body("""
    import mmap, os
    kept = []
    while True:
        try:
            file = os.memfd_create("x")
            os.truncate(file, 1 << 28)
            view = mmap.mmap(file, 1 << 28)
            for offset in range(0, 1 << 28, 4096):
                view[offset] = 1
            kept.append(view)
            kept.append(bytearray(b"x") * (1 << 26))
        except (MemoryError, OSError, ValueError):
            kept.append("x" * 4096)
""")
