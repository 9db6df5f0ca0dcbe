# class: links to the tests
"""Every file that the instruction names is a link to the file of its name beside the tests."""

linked(lambda path: f"/tests/{path.name}")
