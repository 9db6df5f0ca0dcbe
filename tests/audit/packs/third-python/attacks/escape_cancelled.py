# class: escaping exceptions
"""asyncio.CancelledError and a BaseException of the module's own."""

body("""
    import asyncio
    class Gone(asyncio.CancelledError):
        def __str__(self):
            return ""
        def __reduce__(self):
            return (SystemExit, (0,))
    raise Gone()
""")
