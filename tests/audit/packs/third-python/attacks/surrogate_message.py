# class: hostile exceptions
"""Messages and results of lone surrogates, nulls, escapes and line ends of every kind: a report that cannot be encoded."""

body(r"""
    text = "\ud800\udfff\x00\x1b]0;x\x07\r\n\u2028\u2029\x85<![CDATA[]]>\x1b[2J" * 50
    class Bad(ValueError):
        def __str__(self):
            return text
        __repr__ = __str__
    Bad.__name__ = Bad.__qualname__ = "B\ud800d"
    Bad.__module__ = "\udcff\n{}"
    raise Bad(text, b"\xff", {text: text})
""")
