"""Questions with short answers: NQ-Open, HotpotQA and Banking77.

NQ-Open (Lee et al. 2019, arXiv 1906.00300): any of the listed answers is right. HotpotQA (Yang et al. 2018, arXiv
1809.09600): the prompt holds ten passages; `extra_info["supporting"]` names those that are needed. Banking77 (Casanueva
et al. 2020, arXiv 2003.04807) classifies a bank customer's request: the prompt lists the 77 labels; they are also in
`extra_info["labels"]`, so that a response that names several is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from posttrain.data.recipes.recipe import Recipe, Row, SkippedRow, Split, text_of
from posttrain.data.rows import DataError, RowTable

INSTRUCTION = "Give your final answer, as short as possible, within <answer> and </answer>."
NQ_COLUMNS = "question and answer (a list)"
HOTPOT_COLUMNS = "question, answer, context and supporting_facts"
BANKING_COLUMNS = "text and category (or label_text)"


def nq_open_rows(table: RowTable, split: str) -> Iterator[Row | SkippedRow]:
    for number, row in enumerate(table.rows):
        question = text_of(table, number, NQ_COLUMNS, "question").strip()
        answers = [row["answer"]] if isinstance(row.get("answer"), str) else row.get("answer")
        if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
            raise DataError(f"The answer of {table.where(number)} is missing: the columns are {NQ_COLUMNS}.")
        if not any(char.isalnum() for answer in answers for char in answer):
            yield SkippedRow("its answers hold no letter or digit")
            continue
        yield {
            "prompt": f"{question.removesuffix('?')}?\n{INSTRUCTION}",
            "ground_truth": answers,
            "data_source": "nq_open",
            "extra_info": {"index": number, "split": split},
        }


def hotpotqa_rows(table: RowTable, split: str) -> Iterator[Row]:
    for number, row in enumerate(table.rows):
        question = text_of(table, number, HOTPOT_COLUMNS, "question").strip()
        passages = [f"{title}: {''.join(lines).strip()}" for title, lines in _pairs(row.get("context"), "sentences")]
        if not passages:
            raise DataError(f"The context of {table.where(number)} is missing: the columns are {HOTPOT_COLUMNS}.")
        facts = _pairs(row.get("supporting_facts"), "sent_id")
        yield {
            "prompt": "\n\n".join([*passages, f"{question}\n{INSTRUCTION}"]),
            "ground_truth": text_of(table, number, HOTPOT_COLUMNS, "answer"),
            "data_source": "hotpotqa",
            "extra_info": {
                "index": number,
                "split": split,
                "supporting": list(dict.fromkeys(str(title) for title, _ in facts)),
                "type": str(row.get("type") or ""),
                "level": str(row.get("level") or ""),
            },
        }


def _pairs(value: Any, second: str) -> list[tuple[Any, Any]]:
    # (title, content): the hub stores two lists, the authors' file a list of pairs.
    if isinstance(value, dict):
        return list(zip(value.get("title") or [], value.get(second) or [], strict=False))
    return [(pair[0], pair[1]) for pair in value] if isinstance(value, list) else []


NQ_OPEN = Recipe(
    name="nq_open",
    sentence="questions people asked a search engine, without passages; any listed answer counts",
    splits=(
        Split("train", files=("NQ-open.train.jsonl*",), optional=True),
        Split("validation", files=("NQ-open.dev.jsonl*", "NQ-open.efficientqa.dev*.jsonl*")),
    ),
    columns=NQ_COLUMNS,
    rows=nq_open_rows,
    hub_id="google-research-datasets/nq_open",
    hub_config="nq_open",
)
HOTPOTQA = Recipe(
    name="hotpotqa",
    sentence="questions over two of ten passages that stand in the prompt; scored by the answer's words",
    splits=(
        Split("train", files=("hotpot_train*.json*",), optional=True),
        Split("validation", files=("hotpot_dev_distractor*.json*", "hotpot_distractor*.json*")),
    ),
    columns=HOTPOT_COLUMNS,
    rows=hotpotqa_rows,
    hub_id="hotpotqa/hotpot_qa",
    hub_config="distractor",
)


def banking77_rows(table: RowTable, split: str) -> Iterator[Row]:
    answers = [
        text_of(table, number, BANKING_COLUMNS, "category", "label_text").strip() for number in range(len(table))
    ]
    labels = sorted(set(answers))
    for number, answer in enumerate(answers):
        message = text_of(table, number, BANKING_COLUMNS, "text").strip()
        yield {
            "prompt": f"A bank's customer writes: {message}\n"
            f"Answer with the one label that fits, out of: {', '.join(labels)}.",
            "ground_truth": answer,
            "response": answer,
            "data_source": "banking77",
            "extra_info": {"index": number, "split": split, "labels": labels},
        }


BANKING77 = Recipe(
    name="banking77",
    sentence="customers' messages to be sorted into 77 labels; scored by the label",
    splits=(Split("train"), Split("test")),
    columns=BANKING_COLUMNS,
    rows=banking77_rows,
    hub_id="mteb/banking77",
)
