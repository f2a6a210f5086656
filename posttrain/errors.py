"""UserError, the base of all errors that a user can cause; entry points print its text without a traceback."""

from __future__ import annotations

from pathlib import Path


class UserError(Exception):
    """Says what was wrong, where it was set and what to do."""


def first_line(error: BaseException) -> str:
    """The first line of the message, or the name of the class if there is no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def working_folder() -> Path:
    """The current working folder; UserError if it was deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UserError("The working folder was deleted. Change to one that exists (cd), and start again.") from None
