"""The examiner: the modules that run tests in boxes, with pytest or node, and that decide hidden tests outside of them.

Like `sandbox/guest`, whose `box`, `linux` and `root` they share, they import the standard library and pytest only, and
each other relatively: the folder is mounted into the root file system of boxes.
"""
