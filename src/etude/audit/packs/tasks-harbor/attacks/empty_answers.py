# class: empty answers
"""Every file that the instruction names is there, and says nothing but ok."""

for name in NAMED:
    if not pathlib.Path(name).exists():
        write(name, "ok\n", 0o755)
