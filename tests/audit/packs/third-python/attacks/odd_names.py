# class: odd files
"""Files below the source root whose names are no text, too long, full of line ends, or twins after normalisation."""

package = os.fsencode(PATH.resolve().parent)
for name in (b"\xff\xfe.py", b"a\nb\r.py", b"\x1b[2J.py", b"x" * 255, b"e\xcc\x81.py", b"\xc3\xa9.py", b"-rf.py", b"...", b" .py", b"a\\b.py", b"CON.py",
             b"%s%n{}.py", b"\xed\xa0\x80.py", b"\xe2\x80\xae.py"):
    try:
        with open(package + b"/" + name, "wb") as file:
            file.write(b"x = 1\n")
    except OSError:
        pass
