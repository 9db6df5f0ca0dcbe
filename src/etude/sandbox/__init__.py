"""Boxes: isolated machines that an agent works in, and throwaway forks of a pristine image that run tests.

    backends/    boxes of containers, and the choice of a backend
    namespace/   boxes of this machine's kernel
    this folder  `base`: the types that the rest of the program is written against; `backend`: the contract of a
                 backend; `box`, `shell`, `connection`: the owner's side of a box; what a machine has and looks like
    egress/      the way out of boxes
    guest/       the code that runs in boxes

Each folder imports only those below it, and the room only the foundations. The contract names no type of a backend.
`grading.runner.open_sandbox` opens a sandbox.
"""
