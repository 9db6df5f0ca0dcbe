# class: failures like infrastructure's
"""Fills every folder that can be written, with bytes and then with names."""

body("""
    import os
    for folder in ("/tmp", "/dev/shm", "/var/tmp", "/run", os.getcwd(), os.path.dirname(__file__), os.environ.get("HOME", "/")):
        for size in (1 << 24, 1 << 12, 0):
            for index in range(20000):
                try:
                    with open(f"{folder}/.x{size}-{index}", "wb") as file:
                        file.write(b"x" * size)
                except OSError:
                    break
    raise OSError(28, "No space left on device")
""")
