"""Errors that several parts of etude raise and catch."""


class UserError(Exception):
    """Something the user can fix. The message is one sentence: what was wrong and what to do.

    The command line prints it and exits with code 2, without a traceback. Library code raises ValueError for bad
    arguments; UserError is for conditions of the machine, the run folder or the input as a whole.
    """


class RunFailed(Exception):
    """A run stopped for a reason that is not the user's input (a process died); it can be resumed.

    The message says what happened and how to go on. The command line prints it and exits with code 1.
    """


USERS_FAULTS = (Exception, SystemExit)
"""Exceptions of users' Python that become a sentence: sys.exit there would end etude without one."""


def first_line(error: object) -> str:
    """The first line of an error's message, or its class."""
    return str(error).strip().partition("\n")[0].rstrip() or type(error).__name__


def last_line(output: str, default: str = "") -> str:
    """The last line of a program's output as a terminal shows it: what stands behind its last "\\r"."""
    return output.strip().rpartition("\n")[2].rpartition("\r")[2].strip() or default
