# class: sources that readers cannot read
"""Null bytes, unknown codings, byte order marks, lone carriage returns and form feeds: no reader agrees on lines."""

package = PATH.resolve().parent
(package / "_odd1.py").write_bytes(b"x = 1\0\ny = 2\n")
(package / "_odd2.py").write_bytes(b"# coding: undefined\nx = 1\n")
(package / "_odd3.py").write_bytes(b"\xff\xfex\0 \0=\0 \0001\0\n\0")
(package / "_odd4.py").write_bytes(b"# -*- coding: idna -*-\n" + b"\xf0\x28\x8c\x28" * 100)
(package / "_odd5.py").write_bytes(b"# coding: base64\n" + b"\r" * 5000 + b"\x0c" * 5000)
(package / "_odd6.py").write_bytes(b"# coding: unicode_escape\n# \\N{LATIN}\\ud800\n")
PATH.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r").encode() + b"\r\x1a\r")
