"""DAPO's rule: what follows the last `Answer:` is the truth, 1.0, else -1.0; without one, the last box is looked at."""

from __future__ import annotations

import re
from typing import Any

from verl.utils.reward_score._boxes import last_boxed

_READ, _BOX_READ = 300, 100
NOTHING = "[INVALID]"
_DROPPED = re.compile(
    r"\\(?:\$|;|!| |ldots|dots|mathrm\{th\})|\^(?:\\circ|\{\\circ\})|\{,\}|[\"\s]"
    r"|(?:square|ways|integers|dollars|mph|inches|hours|km|units|points|feet|minutes|digits|cents|degrees|cm|gm|pounds"
    r"|meters|meals|edges|students|multiples)"
)
_ARTICLE = re.compile(r"an? ")
_WRAPPED = re.compile(r"\\(?:text|textbf|mbox|overline|boxed)\{([^{}]*)\}")


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> dict[str, Any]:
    """`score` (1.0 or -1.0), `acc`, and the answer that was read as `pred`."""
    right, answer = verify(solution_str[-_READ:], ground_truth, strict_box_verify, pause_tokens_index)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": answer}


def verify(
    solution_str: str, answer: str, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> tuple[bool, str | None]:
    """(whether the response is right, the answer that was read)."""
    if not strict_box_verify:
        right, found = is_correct_minerva(solution_str, answer)
        if found != NOTHING:
            return right, found
    verdict, boxed = is_correct_strict_box(solution_str, answer, pause_tokens_index)
    return (verdict == 1, boxed) if strict_box_verify or boxed is not None else (False, NOTHING)


def is_correct_minerva(
    solution_str: str, gt: str, gt_need_extract: bool = False, answer_pattern: str = r"(?i)Answer\s*:\s*([^\n]+)"
) -> tuple[bool, str]:
    """(whether the last answer of this pattern is the truth, that answer in its plain form)."""
    found = re.findall(answer_pattern, solution_str)
    answer = normalize_final_answer(found[-1]) if found else NOTHING
    if gt_need_extract:
        gt = remove_boxed(last_boxed_only_string(gt) or "")
    return answer == normalize_final_answer(gt), answer


def is_correct_strict_box(pred: str, gt: str, pause_tokens_index: Any = None) -> tuple[int, str | None]:
    """(1 or -1, what stands in the last box near the end, to the letter)."""
    start = -_BOX_READ if pause_tokens_index is None else pause_tokens_index[-1] - _BOX_READ
    box = last_boxed_only_string(pred[start:])
    answer = None if box is None else remove_boxed(box)
    return (1 if answer == gt else -1), answer


def normalize_final_answer(final_answer: str) -> str:
    """One spelling: what follows the last `=`, without units, dollars, text commands and thousands' commas."""
    text = _ARTICLE.sub("", final_answer.rpartition("=")[2])
    inside = re.search(r"\$(.*?)\$", text)
    text = inside.group(1) if inside else text
    text = _DROPPED.sub("", _WRAPPED.sub(r"\1", text))
    text = re.sub(r"(frac)([^{])(.)", r"\1{\2}{\3}", text)
    text = re.sub(r"(sqrt)([^{])", r"\1{\2}", text).replace("$", "")
    return text.replace(",", "") if text.replace(",", "").isdigit() else text.strip()


def last_boxed_only_string(string: str) -> str | None:
    return last_boxed(string, ("\\boxed{",))


def remove_boxed(s: str) -> str:
    assert s.startswith("\\boxed{") and s.endswith("}"), f"not a box: {s}"
    return s[len("\\boxed{") : -1]
