"""The exit codes of the commands and workers of this project, and the one line that they print after an error.

Whoever starts such a process (``shuffle.run.supervisor``, a service manager, a person) can tell from the code whether
trying again may help.
"""

from __future__ import annotations

import sys

from shuffle.errors import BadInput, SpecError, UserCodeError

EXIT_FAILED = 1
"""The process failed; the line after ``error:`` on stderr says why."""
EXIT_SPEC = 2
"""The spec, the arguments or other input were wrong: nothing was changed, and trying again will not help."""
EXIT_USER_CODE = 3
"""The user's map or reduce raised an exception."""
EXIT_INTERRUPTED = 130
"""The process was ended with Ctrl-C."""
EXIT_BROKEN_PIPE = 141
"""The reader of the output has closed the pipe, as ``| head`` does."""


def exit_code_of(error: Exception) -> int:
    """The exit code of a process that ends because of ``error``."""
    if isinstance(error, UserCodeError):
        return EXIT_USER_CODE
    return EXIT_SPEC if isinstance(error, SpecError | BadInput) else EXIT_FAILED


def report(error: Exception) -> int:
    """Prints ``error: …`` on stderr and returns the exit code for ``error``. A process calls it last."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    return exit_code_of(error)
