"""HH-RLHF (Bai et al. 2022, arXiv 2204.05862): conversations with two final answers, one of which people preferred.

`hh_rlhf` writes pairs for a reward model: {"prompt": the messages before, "chosen": text, "rejected": text}.
`hh_rlhf_sft` writes the preferred conversations for supervised training: {"messages": [...]}.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from posttrain.data.recipes.recipe import Converted, Recipe, SkippedRow, SourceRow, Split
from posttrain.data.rows import DataError

COLUMNS = "chosen and rejected"
ROLES = {"Human": "user", "Assistant": "assistant"}
_TURN = re.compile(r"\n\n(Human|Assistant):")
Turns = list[dict[str, str]]


def pair_rows(rows: Sequence[SourceRow]) -> Iterator[Converted]:
    for row in rows:
        chosen, rejected = row.text("chosen"), row.text("rejected")
        prompt = _find_shared_start(chosen, rejected)
        if not prompt:
            raise DataError(f"The two conversations of {row.where} do not begin with the same question.")
        # What follows is the answer, even if someone wrote `Human:` in it.
        answers = [text[len(prompt) :].removeprefix("\n\nAssistant:").strip() for text in (chosen, rejected)]
        if not all(answers):
            yield SkippedRow("an answer is empty")
            continue
        yield {"prompt": _turns(prompt), "chosen": answers[0], "rejected": answers[1]}


def conversation_rows(rows: Sequence[SourceRow]) -> Iterator[Converted]:
    for row in rows:
        messages = _turns(row.text("chosen"))
        yield {"messages": messages} if messages[-1]["content"] else SkippedRow("an answer is empty")


def _find_shared_start(chosen: str, rejected: str) -> str:
    # Ends where the last assistant turn begins, which both have in common up to there.
    starts = [match.start() for match in _TURN.finditer(chosen) if match[1] == "Assistant"]
    shared = [start for start in starts if rejected.startswith(chosen[:start] + "\n\nAssistant:")]
    return chosen[: shared[-1]] if shared else ""


def _turns(text: str) -> Turns:
    # Consecutive turns of one role become one, because chat templates expect them to alternate.
    parts = _TURN.split(text)
    turns: Turns = []
    for role, content in zip(parts[1::2], parts[2::2], strict=True):
        if turns and turns[-1]["role"] == ROLES[role]:
            turns[-1]["content"] += f"\n\n{content.strip()}"
        else:
            turns.append({"role": ROLES[role], "content": content.strip()})
    return turns


_SPLITS = (
    Split("train", files=("*train.jsonl.gz", "*train.jsonl"), optional=True),
    Split("test", files=("*test.jsonl.gz", "*test.jsonl"), optional=True),
)
PAIRS = Recipe(
    name="hh_rlhf",
    sentence="conversations with a preferred and a rejected answer: pairs for a reward model",
    splits=_SPLITS,
    columns=COLUMNS,
    rows=pair_rows,
    hub_id="Anthropic/hh-rlhf",
)
CONVERSATIONS = Recipe(
    name="hh_rlhf_sft",
    sentence="the preferred conversations of hh_rlhf as messages: multi-turn rows for SFT",
    splits=_SPLITS,
    columns=COLUMNS,
    rows=conversation_rows,
    hub_id="Anthropic/hh-rlhf",
    data_source="hh_rlhf",
)
