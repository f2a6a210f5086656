"""`classification`: one label out of a set.

1.0 if the response names the right label, in any case and with other words around it, else 0.0. If `extra_info` holds
the set of labels (`labels`, `choices` or `options`), a response that names more than one of them scores 0.0.
"""

from __future__ import annotations

from typing import Any

from posttrain.rewards.scorers import register_scorer
from posttrain.rewards.scorers.qa import accepted_answers, contains_words, final_text, normal_text


@register_scorer("classification", data_sets=("banking77",))
def score(solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, float | str]:
    """Return 1.0 or 0.0, and the label that was named as `pred` (empty if none of the known labels was)."""
    text, _ = final_text(solution_str)
    said, truths = _label_form(text), [_label_form(label) for label in accepted_answers(ground_truth)]
    if said in truths:
        return {"score": 1.0, "pred": said}
    labels = _labels(extra_info)
    if not labels:
        named = [truth for truth in truths if truth and contains_words(said, truth)]
        return {"score": float(bool(named)), "pred": named[0] if named else said[:100]}
    named = _find_labels(said, set(labels) | set(truths))
    return {"score": float(len(named) == 1 and named[0] in truths), "pred": named[0] if len(named) == 1 else ""}


def _label_form(text: str) -> str:
    # Labels are often identifiers (card_arrival); people and models also write them as words.
    return normal_text(text.replace("_", " "))


def _labels(extra_info: Any) -> list[str]:
    for key in ("labels", "choices", "options"):
        if isinstance(extra_info, dict) and extra_info.get(key) is not None:
            return [_label_form(label) for label in accepted_answers(extra_info[key])]
    return []


def _find_labels(said: str, labels: set[str]) -> list[str]:
    # Longest first, so that `not spam` is not also read as `spam`.
    named = []
    for label in sorted(labels, key=lambda label: (-len(label), label)):
        if label and contains_words(said, label):
            named.append(label)
            said = f" {said} ".replace(f" {label} ", " | ").strip() if " " in said else said.replace(label, " | ")
    return named
