"""Boxes: isolated machines that an agent works in, and throwaway forks of a pristine image that run tests.

    backends/    boxes of containers, and the choice of a backend
    namespace/   boxes of this machine's kernel
    images/      the root folders that boxes are made of, and their cache
    this folder  `base`: the types that the rest of the program is written against; `backend`: the contract of a
                 backend; `box`, `shell`, `connection`, `left_state`: the owner's side of a box; features and looks of
                 a machine
    egress/      the way out of boxes
    guest/       the code that runs in boxes

Each folder imports only those below it, and the room only the foundations. The contract names no type of a backend.
`grading.runner.open_sandbox` opens a sandbox.
"""

from etude.sandbox.backend import (
    Backend,
    BackendOptions,
    ForkRequest,
    ForkResult,
    HiddenControls,
    RunImage,
    RunServer,
    VerifyRequest,
    VerifyResult,
)
from etude.sandbox.base import (
    HOST_SOCKET_PORT,
    TOOLS,
    WORKSPACE,
    ApplyFailed,
    Box,
    BoxDead,
    BoxError,
    Capabilities,
    Changes,
    Escape,
    ExecResult,
    Image,
    LaunchFailed,
    Limits,
    NoSpace,
    NotFound,
    NotRegular,
    RunCounts,
    Sandbox,
    TestReport,
    TooLarge,
)
from etude.sandbox.box import MAX_FILE_BYTES, ValueBox, checked_path
from etude.sandbox.fingerprints import FingerprintSample, parse_fingerprint, read_fingerprints
from etude.sandbox.guest.machine_profile import stamp
from etude.sandbox.guest.root import RUNNER, SITE
from etude.sandbox.kernel import MachineCheck, read_host, requirements
from etude.sandbox.left_state import LeftState, StateWatch
from etude.sandbox.machine_profile import ProfileSource, checkout, load_profiles
from etude.sandbox.shell import ProgramResult, Shell

PUBLIC = ("", "backends.choose", "egress", "guest.boxed_runner", "images.store", "namespace")
