"""How a process ends after an error: one line on stderr, and the exit code of the error."""

from __future__ import annotations

import pytest

from shuffle.errors import BadInput, SpecError, StoreUnavailable, UnknownTable, UserCodeError
from shuffle.support.exit_codes import EXIT_FAILED, EXIT_SPEC, EXIT_USER_CODE, exit_code_of, report


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpecError("no such queue"), EXIT_SPEC),
        (BadInput("no such option"), EXIT_SPEC),
        (UnknownTable("no such table"), EXIT_SPEC),
        (UserCodeError("ValueError: bad row"), EXIT_USER_CODE),
        (StoreUnavailable("not running"), EXIT_FAILED),
    ],
)
def test_errors_are_one_line_and_an_exit_code(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(error) == exit_code_of(error) == code
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"error: {error}\n")


def test_codes_that_others_rely_on() -> None:
    """Scripts and service managers know these numbers."""
    assert (EXIT_FAILED, EXIT_SPEC, EXIT_USER_CODE) == (1, 2, 3)
