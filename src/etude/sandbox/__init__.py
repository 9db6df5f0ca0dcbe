"""Boxes: isolated machines that an agent works in, and throwaway forks of a pristine image that run tests.

`base.py` holds the types that the rest of the program is written against, `backend.py` the contract of a backend,
`namespace/` the backend of this machine's kernel, `backends/` those of containers and services, `guest/` the code that
runs in boxes, `egress/` their way out. The room imports only the foundations; `grading.runner.open_sandbox` opens one.
"""
