"""Prompts that say too much or in another form than was meant: messages as text, a template before the template, the
truth inside, one truth for all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from posttrain.doctor.case import Case
from posttrain.doctor.finding import WARNING, Finding

AREA = "data"
MARKERS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "[INST]", "<|user|>", "<|assistant|>", "<|turn>")
"""With which the chat templates of well-known families begin a turn."""
END = 40
"""Characters at the end of a prompt: a truth that was appended stands there, one of a quoted text seldom does."""
ENOUGH = 10
"""Rows from which one truth for all of them is no chance."""


def check_prompts(case: Case, split: str, prompts: Sequence[Any], where: str) -> Iterator[Finding]:
    """`prompts` as they stand in the file."""
    texts = [_last_text(prompt) for prompt in prompts]
    if spelled := sum(isinstance(prompt, str) and _is_messages(prompt) for prompt in prompts):
        what = f"{spelled} of {len(prompts)} {split} prompts are messages written down as text: the model would "
        what += "read brackets and quotes as the user's words."
        yield Finding(WARNING, AREA, what, where, "store them as lists of objects with role and content")
    if getattr(case.tokenizer, "chat_template", None):
        marked = [text for text in texts if any(marker in text for marker in MARKERS)]
        if len(marked) > len(texts) / 2:
            marker = next(marker for marker in MARKERS if marker in marked[0])
            what = f"{len(marked)} of {len(texts)} {split} prompts hold {marker}: they went through a chat template "
            what += "before, and the tokenizer's own would be applied as well: twice."
            yield Finding(WARNING, AREA, what, where, "store what the user says alone, without the template's marks")


def check_truths_in_prompts(split: str, items: Sequence[Any], where: str) -> Iterator[Finding]:
    """`items` as training has them: prompts with their truths."""
    pairs = [(_last_text(item["raw_prompt"]), str(item["ground_truth"])) for item in items]
    pairs = [(text, truth) for text, truth in pairs if truth.strip() and truth != "None"]
    if len(pairs) < ENOUGH:
        return
    truths = {truth for _, truth in pairs}
    if len(truths) == 1:
        what = (
            f"All {len(pairs)} {split} rows have the same truth ({pairs[0][1][:40]!r}): one answer to everything would "
        )
        what += "be right."
        yield Finding(WARNING, AREA, what, where, "look whether the truth is read from the right column")
        return
    held = sum(_ends_with(text, truth) for text, truth in pairs)
    by_chance = sum(_ends_with(text, pairs[i - 1][1]) for i, (text, _) in enumerate(pairs))
    if held > len(pairs) / 2 and by_chance < held / 2:
        what = f"{held} of {len(pairs)} {split} prompts end with their own truth: the model would learn to copy it."
        yield Finding(WARNING, AREA, what, where, "take the truth out of the prompts")


def _ends_with(text: str, truth: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(truth)}(?!\w)", text[-END - len(truth) :]) is not None


def _last_text(prompt: Any) -> str:
    """What the last turn says; of a plain prompt, all of it."""
    if isinstance(prompt, list) and prompt:
        prompt = prompt[-1].get("content") if isinstance(prompt[-1], dict) else prompt[-1]
    return prompt if isinstance(prompt, str) else ""


def _is_messages(text: str) -> bool:
    if not text.lstrip().startswith("[{"):
        return False
    try:
        found = json.loads(text)
    except ValueError:
        return "'role'" in text and "'content'" in text  # as Python prints it
    return isinstance(found, list) and all(isinstance(one, dict) and {"role", "content"} <= set(one) for one in found)
