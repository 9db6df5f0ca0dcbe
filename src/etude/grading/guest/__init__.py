"""The examiner: modules that run tests in boxes, with pytest or node, and that decide hidden tests outside of these
boxes.

Like `sandbox/guest`, whose `box`, `linux` and `root` they share, they import only the standard library and pytest, and
each other relatively: the folder is mounted into the root file system of boxes.
"""
