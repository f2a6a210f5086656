"""What went wrong in user code, in a few lines: the error, the file and line, and the missing import if that is it."""

from __future__ import annotations

import importlib.util
import math
import os
import traceback

from posttrain.rewards.types import RewardError

_HERE = os.path.dirname(os.path.abspath(__file__))
_FRAMES = 3
_LONGEST = 500


def describe_exception(error: BaseException) -> str:
    """`NameError: name 'torch' is not defined (add `import torch`)`, then the innermost lines of user code."""
    said = text_of(error, _LONGEST)
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    if isinstance(error, SystemExit):
        text = f"the function called exit({error.code!r})"
    if isinstance(error, RewardError):
        text = said
    if isinstance(error, NameError) and error.name and _importable(error.name):
        text += f" (the file never imports it: add `import {error.name}`)"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _ours(f.filename)]
    lines = [f"  {f.filename}, line {f.lineno}, in {f.name}: {f.line or ''}".rstrip(": ") for f in frames[-_FRAMES:]]
    return "\n".join([text[:_LONGEST], *lines])


def text_of(value: object, most: int) -> str:
    """The value's text, cut; what has none (an integer beyond 4,300 digits, a `__str__` that fails) is described."""
    try:
        return str(value)[:most]
    except Exception:
        if isinstance(value, int):
            return f"an integer of some {round(value.bit_length() * math.log10(2))} digits"
        return f"a {type(value).__name__} that has no text"


def explain_import_failure(error: BaseException, what: str) -> RewardError:
    """The RewardError for a user's file that could not be imported."""
    if isinstance(error, SyntaxError):
        return RewardError(
            f"syntax error in {error.filename}, line {error.lineno}: {error.msg}: {(error.text or '').strip()}",
            todo="correct that line",
        )
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    return RewardError(
        f"importing the reward {what} failed: {describe_exception(error)}",
        todo=f"install {missing}, or correct the import" if missing else "correct the file; workers import it as it is",
    )


def _ours(filename: str) -> bool:
    return filename.startswith((_HERE, "<frozen")) or f"{os.sep}importlib{os.sep}" in filename


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
