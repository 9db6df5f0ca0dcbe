"""What runs in the zygote and below it: the standard library and pytest only, never torch, never etude.

The zygote mounts this folder into the boxes' root file system, so its modules import each other relatively.
"""
