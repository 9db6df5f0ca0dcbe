# class: sources that readers cannot read
"""The same in the changed module itself: chains that compile on a large stack only, behind the function."""

tail("if False:\n    x = " + "-" * 3000 + "1\n    y = a" + ".b" * 3000 + "\n    z = " + " + ".join(["1"] * 9000) + "\n    n = " + "9" * 4200)
body("raise ValueError")
