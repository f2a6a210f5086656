"""Built-in scorers, one per file, chosen by a row's `data_source`. `SCORERS["mine"] = score` adds your own.

A scorer is `score(solution_str, ground_truth, extra_info) -> float | dict`; ours return `{"score": ..., "pred":
answer}`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from posttrain.registry import Registry
from posttrain.rewards.types import RewardError

Scorer = Callable[[str, Any, Any], "float | dict[str, Any]"]
F = TypeVar("F", bound=Callable[..., Any])

SCORERS: Registry[Scorer] = Registry("scorer", package="posttrain.rewards.scorers")
"""Data source -> scorer."""
ALIASES: dict[str, str] = {}
"""Data sets by the last part of their hub name (`HuggingFaceH4/MATH-500`), in lower case -> the data source."""

# What a worker tells built-in scorers is kept here and not in their files: a worker whose reward uses none of them
# then starts in half the time.
CODE_SETTINGS: dict[str, Any] = {"sandbox": {}, "partial_credit": False}
"""`sandbox` holds fields of `SandboxConfig`; `code.configure` changes them in a process that has scored before."""
before_slow_import: Callable[[], object] = lambda: None  # noqa: E731  (a worker replaces it to extend its deadline)


def register_scorer(source: str, *, data_sets: Iterable[str] = ()) -> Callable[[F], F]:
    """Decorator: register the scorer of a data source, and of these data sets (see `ALIASES`)."""
    ALIASES.update(dict.fromkeys(data_sets, source))
    return SCORERS.register(source)


NO_SCORER = "no built-in scorer for data source"


def known_sources() -> list[str]:
    """List the data sources that have a built-in scorer."""
    return sorted(SCORERS)


def canonical_source(data_source: str | None) -> str | None:
    """Return the name under which a data source's scorer is registered (`openai/gsm8k` is `gsm8k`), or None."""
    if data_source in SCORERS:
        return data_source
    short = str(data_source).strip().rpartition("/")[2].lower()
    for name in (short, ALIASES.get(short)):
        if name in SCORERS:
            return name
    return None


def is_code(data_source: str | None) -> bool:
    """Whether rows of a source are scored by running programs."""
    return canonical_source(str(data_source)) in ("code", "code_generation")


def score_by_source(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float | dict[str, Any]:
    """Score a response with its data source's scorer; RewardError if there is none."""
    return find_scorer(data_source)(solution_str, ground_truth, extra_info)


def find_scorer(data_source: str | None) -> Scorer:
    """Return the scorer of a data source; RewardError if there is none."""
    name = canonical_source(data_source)
    if name is not None:
        return SCORERS[name]
    where = "column data_source of the data, or data.data_source for rows without it"
    own = "give your own function: custom_reward_function.path=my_reward.py (train.sh: --reward_func my_reward.py)"
    near = difflib.get_close_matches(str(data_source).lower(), known_sources(), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise RewardError(
        f"{NO_SCORER} {data_source!r}" if data_source else f"{NO_SCORER}s that are not named: the rows have none",
        where,
        f"{hint}use one of {', '.join(known_sources())}; or {own}",
    )


def check_sources(sources: Iterable[str | None]) -> None:
    """Raise one RewardError that lists every data source without a built-in scorer; call it before a run."""
    problems: list[RewardError] = []
    for source in sorted(set(sources), key=str):
        try:
            find_scorer(source)
        except RewardError as error:
            problems.append(error)
    if problems:
        raise RewardError("; ".join(problem.what for problem in problems), problems[0].where, problems[0].todo)
