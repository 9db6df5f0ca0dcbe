# class: odd files
"""Folders nested deeper than any path, and tens of thousands of small files, below the source root."""

here = os.getcwd()
os.chdir(PATH.resolve().parent)
try:
    for index in range(3000):
        os.mkdir("d" * 200)
        os.chdir("d" * 200)
    pathlib.Path("x.py").write_text("x = 1\n")
except OSError:
    pass
os.chdir(here)
many = PATH.resolve().parent / "many"
many.mkdir()
try:
    for index in range(30000):
        (many / f"m{index}.py").write_text("x = 1\n")
except OSError:
    pass
