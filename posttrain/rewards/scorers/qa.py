"""`qa`, `trivia`: short text answers compared after normalisation (as SQuAD does: case, articles, punctuation, spaces).

1.0 if the answer equals one of the accepted ones, else 0.0. The answer is in `<answer>`, `\\boxed{}` or after `####`.
Otherwise it follows "the answer is" or is the last line, where a few other words may surround it. The ground truth is
one string or a list of accepted strings (a JSON list in a string works too).
"""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

from posttrain.rewards.answers import explicit_answer, said_answer
from posttrain.rewards.scorers import register_scorer

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_MOST_OTHER_WORDS = 20  # a line that lists everything is no answer


@register_scorer("trivia", data_sets=("trivia_qa", "triviaqa"))
@register_scorer("qa", data_sets=("nq", "nq_open", "natural_questions", "hotpotqa", "hotpot_qa"))
def score(solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, float | str]:
    """Return 1.0 or 0.0, and the normalised answer as `pred` (empty if there was none)."""
    accepted = [form for form in map(normal_text, accepted_answers(ground_truth)) if form]
    answer, marked = final_text(solution_str)
    pred = normal_text(answer)
    if pred in accepted or normal_text(solution_str) in accepted:
        return {"score": 1.0, "pred": pred}
    if not marked:
        for form in accepted:
            if contains_words(pred, form) and len(pred.split()) - len(form.split()) <= _MOST_OTHER_WORDS:
                return {"score": 1.0, "pred": form}
    return {"score": 0.0, "pred": pred}


def final_text(solution_str: str) -> tuple[str, bool]:
    """Return the answer's text, and whether the response marked it as its answer (else it is the last line)."""
    explicit = explicit_answer(solution_str)
    if explicit is not None:
        return explicit, True
    said = said_answer(solution_str)
    if said is not None:
        return said[0], False
    lines = [line for line in solution_str.splitlines() if line.strip()]
    return (lines[-1] if lines else ""), False


def accepted_answers(ground_truth: Any) -> list[str]:
    """Return the ground truth as a list of strings."""
    if hasattr(ground_truth, "tolist"):  # a numpy array, from a parquet column of lists
        ground_truth = ground_truth.tolist()
    if isinstance(ground_truth, str) and ground_truth.lstrip().startswith("["):
        try:
            ground_truth = json.loads(ground_truth)
        except ValueError:
            return [ground_truth]
    if isinstance(ground_truth, list | tuple | set):
        return [str(answer) for answer in ground_truth]
    return [str(ground_truth)]


def normal_text(text: str) -> str:
    """Convert to lower case, remove articles and punctuation, and leave one space between words."""
    text = unicodedata.normalize("NFKC", text).casefold()
    kept = (char for char in text if char == "-" or not unicodedata.category(char).startswith("P"))
    text = "".join(kept).replace("-", " ")
    return " ".join(_ARTICLES.sub(" ", text).split()) or " ".join(text.split())  # "The The" and "A" are answers too


def contains_words(text: str, words: str) -> bool:
    """Whether the text contains these as whole words (in scripts without spaces: as a substring)."""
    if any("぀" <= char <= "鿿" for char in words):
        return words.replace(" ", "") in text.replace(" ", "")
    return f" {words} " in f" {text} "
