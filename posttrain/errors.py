"""The one error that users see: everything they can cause derives from it, and entry points print its text alone."""

from __future__ import annotations

from pathlib import Path


class UserError(Exception):
    """Says what was wrong, where it was set and what to do."""


def first_line(error: BaseException) -> str:
    """Of its words, or its name where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def working_folder() -> Path:
    """The folder that a program was started in; it may be gone."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UserError("The working folder was deleted. Change to one that exists (cd), and start again.") from None
