"""What runners share: the reward, and their protocol: a JSON job in a file, then a JSON line out for each one in.

The first line out is `{"ready": facts}`. What libraries print goes to stderr, which the bench keeps as a log.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

Job = dict[str, Any]
Run = Callable[[dict[str, Any]], dict[str, Any]]


def serve(start: Callable[[Job], tuple[dict[str, Any], Run]]) -> None:
    """`start(job)` loads the system and gives (its settings, what one request runs); serves until stdin closes."""
    job = json.loads(Path(sys.argv[1]).read_text())
    # Descriptor 1 leads to stderr from here on, so that nothing a library prints can mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        settings, run = start(job)
        say({"ready": {"settings": settings, "python": platform.python_version(), "packages": packages()}})
        # One request at a time: the bench decides when a system works, and pauses the others.
        for line in sys.stdin:
            say(run(json.loads(line)))
    except BaseException as error:
        traceback.print_exc()
        with suppress(BrokenPipeError):  # the bench itself may be gone
            say({"error": error_words(error)})
    sys.stderr.flush()
    os._exit(0)  # engines leave threads and processes behind that would keep this one alive


def error_words(error: BaseException) -> str:
    """One line: the first line of the message (two after a colon), with the class of an error not meant for users."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"needs {error.name.partition('.')[0]}, which {sys.executable} does not find"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    for_users = any(kind.__name__ == "UserError" for kind in type(error).__mro__)
    return first if for_users else f"{type(error).__name__}: {first}"


def packages() -> dict[str, str]:
    """Name and version of everything installed in this environment."""
    return {d.metadata["Name"]: d.version for d in sorted(distributions(), key=lambda d: d.metadata["Name"].lower())}


def time_call(work: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result)."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def get_rows(job: Job, request: dict[str, Any]) -> tuple[list[list[int]], list[int]]:
    """(prompts, response lengths) of the work that is asked for; while warming up, of at most `most` tokens."""
    work = job["works"][request.get("work", 0)]
    most = request.get("most")
    return work["prompts"], work["lengths"] if most is None else [min(n, most) for n in work["lengths"]]


def largest(job: Job) -> tuple[int, int]:
    """(rows, tokens of the longest row with its prompt) of the largest work."""
    longest = [
        len(prompt) + n for work in job["works"] for prompt, n in zip(work["prompts"], work["lengths"], strict=True)
    ]
    return max(len(work["prompts"]) for work in job["works"]), max(longest)


def shares_prompts(job: Job) -> bool:
    """Whether some prompt has several rows."""
    return any(len({tuple(prompt) for prompt in work["prompts"]}) < len(work["prompts"]) for work in job["works"])


def rollout_answer(
    seconds: float, wanted: Sequence[int], made: Sequence[int], log_probs: Sequence[int]
) -> dict[str, Any]:
    """The answer to one timed batch: every row must have its tokens; `log_probs` counts those that came with them."""
    short = [(row, got, need) for row, (got, need) in enumerate(zip(made, wanted, strict=True)) if got < need]
    if short:
        row, got, need = short[0]
        # A system that stops early would look fast.
        raise RuntimeError(f"{len(short)} rows are too short; row {row} has {got} of {need} tokens")
    complete = len(log_probs) == len(wanted) and all(g >= n for g, n in zip(log_probs, wanted, strict=True))
    return {"seconds": seconds, "tokens": sum(wanted), "computed": sum(made), "log_probs": complete}


def pick_samples(request: dict[str, Any], tokens: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> Job:
    """As many rows as the request wants to see, from all over the batch, as they were sampled."""
    wanted = request.get("sample")
    if not wanted:
        return {}
    rows = range(0, len(tokens), max(1, len(tokens) // wanted))[:wanted]
    seen, given = [[*map(int, tokens[row])] for row in rows], [[*map(float, log_probs[row])] for row in rows]
    return {"sampled": {"rows": list(rows), "tokens": seen, "log_probs": given}}


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The reward of `bench step`, the same for all: the share of letters in the response, in a few microseconds."""
    return sum(map(str.isalpha, solution_str)) / max(1, len(solution_str))


def share_of_letters(completions: list[Any], **columns: Any) -> list[float]:
    """The same as TRL calls it: a batch of chat messages."""
    return [compute_score("", completion[0]["content"], "") for completion in completions]
