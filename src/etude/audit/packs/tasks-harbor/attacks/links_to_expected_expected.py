# class: links to the tests
"""Every file that the instruction names is a link to the file that is called expected."""

linked(lambda path: f"/tests/expected{path.suffix or '.txt'}")
