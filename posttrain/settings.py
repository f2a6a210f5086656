"""How a field of a settings class declares what it takes: its default, a range or a few names, and when it is idle.

    @dataclass
    class Settings:
        temperature: float = setting(1.0, range=POSITIVE)
        \"\"\"One sentence, for `posttrain explain`, the YAML tree and the docs.\"\"\"
        mode: str = setting("fast", choices=("fast", "exact"))
        steps: int = setting(8, idle=".mode is fast")

The check, its message and the pages are derived from this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple


class Range(NamedTuple):
    """What the value of a setting must be."""

    allows: Callable[[Any], bool]
    # What follows "must be" in a message.
    words: str
    # Whether infinity is allowed, which means that there is no limit.
    may_be_infinite: bool = False


def at_least(low: float) -> Range:
    return Range(lambda value: value >= low, f"{low} or more")


def above(low: float) -> Range:
    return Range(lambda value: value > low, f"above {low}")


ONE_OR_MORE, ZERO_OR_MORE, POSITIVE = at_least(1), at_least(0), above(0)
SHARE = Range(lambda value: 0 <= value <= 1, "between 0 and 1")
POSITIVE_SHARE = Range(lambda value: 0 < value <= 1, "above 0 and at most 1")
POSITIVE_OR_INFINITE = POSITIVE._replace(may_be_infinite=True)
ABOVE_ONE_OR_INFINITE = above(1)._replace(may_be_infinite=True)
COUNT_OR_ALL = Range(lambda value: value == -1 or value >= 1, "-1, or 1 or more")
COUNT_OR_UNSET = Range(lambda value: value >= -1, "-1, or 0 or more")
BETAS = Range(lambda value: len(value) == 2 and all(0 <= beta < 1 for beta in value), "two numbers from 0 to below 1")
WEIGHTS = Range(lambda value: len(value) > 0 and all(0 < weight < inf for weight in value), "positive numbers")
STEPS = Range(lambda value: all(step >= 1 for step in value), "steps, which are counted from 1")
SEED = Range(lambda value: abs(value) < 2**63, "smaller than 2**63")
GROUP = Range(lambda value: 1 <= value <= 10_000, "from 1 to 10000")
PROCESSES = Range(lambda value: 1 <= value <= 1000, "from 1 to 1000")
# Larger scores count as failed: training squares them, and the largest float32 is 3e38.
LARGEST_SCORE = 1e18
SCORE = Range(lambda value: abs(value) <= LARGEST_SCORE, f"between -{LARGEST_SCORE:g} and {LARGEST_SCORE:g}")
SECONDS = Range(lambda value: 1e-3 <= value < inf, "0.001 or more, and finite")
DTYPES = ("auto", "float32", "bfloat16", "float64")
SCHEDULES = ("constant", "linear", "cosine")


class Idle(NamedTuple):
    """A reason for which a setting that is set has no effect; a run prints it as a note.

    A reason of the form `KEY is VALUE`, `KEY is not VALUE`, `KEY is set` or `KEY is not set` is its own condition;
    VALUE is written as on the command line, and more words may follow a comma. A key that begins with a dot lies in the
    setting's own section. Other reasons have a function of the whole configuration as their condition.
    """

    reason: str
    condition: Callable[[Any], bool] | None = None


def setting(
    default: Any = dataclasses.MISSING,
    *,
    factory: Any = dataclasses.MISSING,
    range: Range | None = None,
    choices: Sequence[str] = (),
    idle: str | Idle | Sequence[str | Idle] = (),
    is_path: bool = False,
    is_literal: bool = False,
) -> Any:
    """A dataclass field with this default (`factory` makes one that is mutable) and what it takes; null always passes.

    idle: reasons for which it has no effect, in the order in which they are tried; those of a section hold for all
        settings in it. is_path: `~` and variables in it are replaced, and a variable that is not set is a problem.
        is_literal: a `$` in it is kept as it is.

    The result is typed Any, so that a checker takes the field's own annotation.
    """
    if isinstance(default, list | dict | set):
        raise TypeError(f"setting({default!r}): all runs would share it; write setting(factory=lambda: {default!r})")
    if range is not None and not isinstance(range, Range):
        raise TypeError(f"setting(range={range!r}): a range is one of posttrain.settings, such as POSITIVE or above(1)")
    if isinstance(choices, str):
        raise TypeError(f"setting(choices={choices!r}): choices are a tuple of names, such as ({choices!r},)")
    reasons = [idle] if isinstance(idle, str | Idle) else idle
    takes = {"range": range, "choices": tuple(choices), "is_path": is_path, "is_literal": is_literal}
    takes["idle"] = tuple(Idle(one) if isinstance(one, str) else one for one in reasons)
    metadata = {name: value for name, value in takes.items() if value}
    return dataclasses.field(default=default, default_factory=factory, metadata=metadata)


def range_of(field: dataclasses.Field[Any]) -> Range | None:
    return field.metadata.get("range")


def choices_of(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    return field.metadata.get("choices", ())
