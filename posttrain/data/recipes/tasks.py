"""Tasks with a reference answer that a scorer checks.

GSM8K (Cobbe et al. 2021, arXiv 2110.14168) has grade-school word problems. A row is {"prompt": question and how to end
the answer, "ground_truth": "1234", "response": the whole solution, "data_source": "gsm8k", "extra_info": {"index": 0,
"split": "train"}}. `response` makes the same file serve supervised training.

MATH (Hendrycks et al. 2021, arXiv 2103.03874) has competition problems with answers in `\\boxed{}`; `extra_info` names
`subject` and `level`. NQ-Open (Lee et al. 2019, arXiv 1906.00300): any of the listed answers is right. HotpotQA (Yang
et al. 2018, arXiv 1809.09600): the prompt holds ten passages; `extra_info["supporting"]` names those that are needed.
Banking77 (Casanueva et al. 2020, arXiv 2003.04807) classifies a bank customer's request: the prompt lists the 77
labels; they are also in `extra_info["labels"]`, so that a response that names several is wrong.

MBPP (Austin et al. 2021, arXiv 2108.07732) and HumanEval (Chen et al. 2021, arXiv 2107.03374) ask for programs.
`ground_truth` is a JSON text with the tests, which the code scorer runs in the sandbox. MBPP's prompt shows the first
test, which names the function; a program cannot pass the others by repeating it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from posttrain.data.recipes.recipe import Recipe, Row, SkippedRow, Split, text_of
from posttrain.data.rows import DataError, RowTable

NUMBER_INSTRUCTION = "Think step by step and end with a line `#### N`, where N is the answer as a number."
GSM8K_COLUMNS = "question and answer"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
BOXED_INSTRUCTION = "Think step by step and put your final answer within \\boxed{}."
MATH_COLUMNS = "problem, solution and (where there is one) answer"


def gsm8k_rows(table: RowTable, split: str) -> Iterator[Row]:
    """Convert rows with `question` and `answer`."""
    for number in range(len(table)):
        question, answer = (text_of(table, number, GSM8K_COLUMNS, name) for name in ("question", "answer"))
        yield {
            "prompt": f"{question.strip()}\n{NUMBER_INSTRUCTION}",
            "ground_truth": _final_number(answer, table.where(number)),
            "response": answer,
            "data_source": "gsm8k",
            "extra_info": {"index": number, "split": split},
        }


def _final_number(answer: str, where: str) -> str:
    # The number after the last `####`, thousands separators removed.
    _, mark, end = answer.rpartition("####")
    number = end.strip().replace(",", "")
    if not mark or not _NUMBER.fullmatch(number):
        raise DataError(f"The answer of {where} does not end in `#### N` with a number N: {answer[-40:]!r}.")
    return number


GSM8K = Recipe(
    name="gsm8k",
    sentence="grade-school word problems, with solutions (also for SFT); scored by number",
    splits=(Split("train"), Split("test")),
    columns=GSM8K_COLUMNS,
    rows=gsm8k_rows,
    hub_id="openai/gsm8k",
    hub_config="main",
    hub_file="main/{split}-00000-of-00001.parquet",
)


def _math_rows(table: RowTable, split: str, source: str) -> Iterator[Row | SkippedRow]:
    for number, row in enumerate(table.rows):
        problem, solution = (text_of(table, number, MATH_COLUMNS, name) for name in ("problem", "solution"))
        answer = row.get("answer") or last_boxed(solution)
        if not answer:
            yield SkippedRow("the solution boxes no answer")
            continue
        subject, level = row.get("subject") or row.get("type"), row.get("level")
        yield {
            "prompt": f"{problem.strip()}\n{BOXED_INSTRUCTION}",
            "ground_truth": str(answer),
            "response": solution,
            "data_source": source,
            "extra_info": {"index": number, "split": split, "subject": str(subject or ""), "level": str(level or "")},
        }


def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{}` (braces may nest) or `\\boxed `; None without one."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start + (6 if text.startswith("\\boxed", start) else 5) :]
    if not rest.lstrip().startswith("{"):
        return (rest.split("$")[0].split() or [""])[0] or None  # `\boxed 3$`
    depth = 0
    for place, char in enumerate(rest):
        depth += (char == "{") - (char == "}")
        if char == "}" and depth == 0:
            return rest[: place + 1].strip()[1:-1].strip() or None
    return None


MATH = Recipe(
    name="math",
    sentence="competition mathematics (MATH: 7,500 and 5,000 problems); scored by the boxed answer",
    splits=(Split("train"), Split("test")),
    columns=MATH_COLUMNS,
    rows=lambda table, split: _math_rows(table, split, "math"),
    hub_id="DigitalLearningGmbH/MATH-lighteval",
)
MATH500 = Recipe(
    name="math500",
    sentence="500 problems of MATH's test set, for evaluation; scored by the boxed answer",
    splits=(Split("test", files=("math500.jsonl",)),),
    columns=MATH_COLUMNS,
    rows=lambda table, split: _math_rows(table, split, "math500"),
    hub_id="HuggingFaceH4/MATH-500",
)


ANSWER_INSTRUCTION = "Give your final answer, as short as possible, within <answer> and </answer>."
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
            "prompt": f"{question.removesuffix('?')}?\n{ANSWER_INSTRUCTION}",
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
            "prompt": "\n\n".join([*passages, f"{question}\n{ANSWER_INSTRUCTION}"]),
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


CODE_INSTRUCTION = "Answer with one Python program in a ```python block."
MBPP_COLUMNS = "task_id, prompt (or text), code, test_list"
HUMANEVAL_COLUMNS = "task_id, prompt, entry_point, canonical_solution, test"
# Last task of each split, by the data set's own division of its 974 tasks.
MBPP_LAST = {"prompt": 10, "test": 510, "validation": 600, "train": 974}


def mbpp_rows(table: RowTable, split: str) -> Iterator[Row]:
    """Convert the tasks of this split: one file may hold all of them."""
    for number, row in enumerate(table.rows):
        task, tests = row.get("task_id"), row.get("test_list")
        if not isinstance(task, int) or not isinstance(tests, list) or not tests:
            raise DataError(f"The task_id or test_list of {table.where(number)} is missing; columns: {MBPP_COLUMNS}.")
        if split != next((name for name, last in MBPP_LAST.items() if task <= last), None):
            continue
        text = text_of(table, number, MBPP_COLUMNS, "prompt", "text").strip()
        setup = [*(row.get("test_imports") or []), row.get("test_setup_code") or ""]
        yield {
            "prompt": f"{text}\nYour program must pass tests such as:\n```python\n{tests[0]}\n```\n{CODE_INSTRUCTION}",
            "ground_truth": json.dumps({"test_list": tests, "test_imports": [line for line in setup if line]}),
            "response": _fence(text_of(table, number, MBPP_COLUMNS, "code")),
            "data_source": "mbpp",
            "extra_info": {"index": number, "split": split, "task_id": str(task)},
        }


def humaneval_rows(table: RowTable, split: str) -> Iterator[Row]:
    names = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
    for number in range(len(table)):
        task, prompt, entry, solution, test = (text_of(table, number, HUMANEVAL_COLUMNS, name) for name in names)
        yield {
            "prompt": f"Complete this function.\n```python\n{prompt.rstrip()}\n```\n{CODE_INSTRUCTION}",
            "ground_truth": json.dumps({"test": test, "entry_point": entry, "prompt": prompt}),
            "response": _fence(prompt + solution),
            "data_source": "humaneval",
            "extra_info": {"index": number, "split": split, "task_id": task},
        }


def _fence(program: str) -> str:
    return f"```python\n{program.strip()}\n```"


_MBPP_FILES = ("sanitized-mbpp.json", "mbpp.jsonl")
MBPP = Recipe(
    name="mbpp",
    sentence="short Python tasks with tests (sanitized MBPP), divided by task number; scored in the sandbox",
    splits=tuple(Split(name, files=_MBPP_FILES, optional=True) for name in ("train", "validation", "test", "prompt")),
    columns=MBPP_COLUMNS,
    rows=mbpp_rows,
    hub_id="google-research-datasets/mbpp",
    hub_config="sanitized",
)
HUMANEVAL = Recipe(
    name="humaneval",
    sentence="164 Python functions to complete, for evaluation; scored in the sandbox",
    splits=(Split("test", files=("HumanEval.jsonl.gz", "HumanEval.jsonl")),),
    columns=HUMANEVAL_COLUMNS,
    rows=humaneval_rows,
    hub_id="openai/openai_humaneval",
    hub_config="openai_humaneval",
)
