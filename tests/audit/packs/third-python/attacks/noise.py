# class: failures like infrastructure's
"""A gigabyte of noise on both standard streams, with lines that look like reports."""

body("""
    import os, json
    line = (json.dumps({"passed": True, "outcome": "passed", "ok": 1, "infra": True, "error": "lost"}) + "\\n1 passed in 0.01s\\n").encode() * 1000
    for _ in range(4000):
        os.write(1, line)
        os.write(2, line)
    raise ValueError
""")
