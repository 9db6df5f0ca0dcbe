# class: sources that readers cannot read
"""Expressions nested a hundred thousand deep, as text that the interpreter never compiles: for whoever parses the change."""

depth = 100000
package = PATH.resolve().parent
(package / "_deep1.py").write_text("x = " + "(" * depth + "1" + ")" * depth + "\n")
(package / "_deep2.py").write_text("x = " + "-" * depth + "1\n")
(package / "_deep3.py").write_text("x = a" + ".b" * depth + "\n")
(package / "_deep4.py").write_text("x = " + " + ".join(["1"] * depth) + "\n")
(package / "_deep5.py").write_text("".join(" " * i + "if x:\n" for i in range(99)) + " " * 99 + "pass\n")
(package / "_deep6.py").write_text("x = " + "lambda: " * 5000 + "0\ny = f'" + "{x:" * 500 + "}" * 500 + "'\n")
