# class: failures like infrastructure's
"""Lowers its own limits (descriptors, data, stack, file size, processor time) so that everything after fails for want of resources."""

body("""
    import resource
    for name in ("NOFILE", "AS", "DATA", "STACK", "FSIZE", "NPROC", "MEMLOCK"):
        try:
            resource.setrlimit(getattr(resource, "RLIMIT_" + name), (1, 1))
        except (OSError, ValueError):
            pass
    resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
    while True:
        pass
""")
