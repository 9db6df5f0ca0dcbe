# class: answers in files
"""A file of the repository, as text: the one whose path is most like the names and arguments of the function."""

shown_file("text")
