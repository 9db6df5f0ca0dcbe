# class: odd files
"""The module's file becomes a package folder, a link to another copy, and a compiled file in its place."""

import py_compile

text = TEXT
PATH.unlink()
folder = PATH.with_suffix("")
folder.mkdir()
(folder / "__init__.py").write_text(text + "\nimport unittest\nunittest.TestCase.run = lambda *a, **k: None\n")
os.symlink(folder / "__init__.py", PATH)
py_compile.compile(str(folder / "__init__.py"), str(PATH.with_suffix(".pyc")))
