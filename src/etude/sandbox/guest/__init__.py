"""The programs in the zygote and below it: the standard library only, never torch, never etude.

The zygote mounts this folder into the boxes' root file system, so its modules import each other relatively. There the
package is `guest.sandbox.guest`; the owner names the module that serves test runs (`sandbox.backend.RunServer`).
`boxed_runner` travels alone, in the command that calls a function of a user (`harness/boxed_tools.py`).
"""
