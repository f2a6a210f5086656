"""Data sets by name: tasks with a reference answer that a scorer checks, and pairs of answers for a reward model.

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

HH-RLHF (Bai et al. 2022, arXiv 2204.05862) has conversations with two final answers, one of which people preferred.
`hh_rlhf` writes pairs for a reward model: {"prompt": the messages before, "chosen": text, "rejected": text};
`hh_rlhf_sft` writes the preferred conversations for supervised training: {"messages": [...]}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from posttrain.data.recipes import Converted, Recipe, SkippedRow, Split, register_recipe
from posttrain.data.recipes.recipe import SourceRow
from posttrain.data.rows import DataError

NUMBER_INSTRUCTION = "Think step by step and end with a line `#### N`, where N is the answer as a number."
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
BOXED_INSTRUCTION = "Think step by step and put your final answer within \\boxed{}."
MATH_COLUMNS = "problem, solution and (where there is one) answer"


def gsm8k_rows(rows: Sequence[SourceRow]) -> Iterator[Converted]:
    for row in rows:
        answer = row.text("answer")
        yield {
            "prompt": f"{row.text('question').strip()}\n{NUMBER_INSTRUCTION}",
            "ground_truth": _final_number(answer, row.where),
            "response": answer,
        }


def _final_number(answer: str, where: str) -> str:
    # The number after the last `####`, thousands separators removed.
    _, mark, end = answer.rpartition("####")
    number = end.strip().replace(",", "")
    if not mark or not _NUMBER.fullmatch(number):
        raise DataError(f"The answer of {where} does not end in `#### N` with a number N: {answer[-40:]!r}.")
    return number


GSM8K = register_recipe(
    Recipe(
        name="gsm8k",
        sentence="grade-school word problems, with solutions (also for SFT); scored by number",
        splits=(Split("train"), Split("test")),
        columns="question and answer",
        rows=gsm8k_rows,
        hub_id="openai/gsm8k",
        hub_config="main",
        hub_file="main/{split}-00000-of-00001.parquet",
    )
)


def math_rows(rows: Sequence[SourceRow]) -> Iterator[Converted]:
    for row in rows:
        problem, solution = row.text("problem"), row.text("solution")
        answer = row.get("answer") or last_boxed(solution)
        if not answer:
            yield SkippedRow("the solution boxes no answer")
            continue
        subject, level = row.get("subject") or row.get("type"), row.get("level")
        yield {
            "prompt": f"{problem.strip()}\n{BOXED_INSTRUCTION}",
            "ground_truth": str(answer),
            "response": solution,
            "extra_info": {"subject": str(subject or ""), "level": str(level or "")},
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


MATH = register_recipe(
    Recipe(
        name="math",
        sentence="competition mathematics (MATH: 7,500 and 5,000 problems); scored by the boxed answer",
        splits=(Split("train"), Split("test")),
        columns=MATH_COLUMNS,
        rows=math_rows,
        hub_id="DigitalLearningGmbH/MATH-lighteval",
    )
)
MATH500 = register_recipe(
    Recipe(
        name="math500",
        sentence="500 problems of MATH's test set, for evaluation; scored by the boxed answer",
        splits=(Split("test", files=("math500.jsonl",)),),
        columns=MATH_COLUMNS,
        rows=math_rows,
        hub_id="HuggingFaceH4/MATH-500",
    )
)


ANSWER_INSTRUCTION = "Give your final answer, as short as possible, within <answer> and </answer>."


def nq_open_rows(rows: Sequence[SourceRow]) -> Iterator[Converted]:
    for row in rows:
        question, given = row.text("question").strip(), row.get("answer")
        answers = [given] if isinstance(given, str) else given
        if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
            raise DataError(f"The answer of {row.where} is missing: the columns are {row.columns}.")
        if not any(char.isalnum() for answer in answers for char in answer):
            yield SkippedRow("its answers hold no letter or digit")
            continue
        yield {
            "prompt": f"{question.removesuffix('?')}?\n{ANSWER_INSTRUCTION}",
            "ground_truth": answers,
        }


def hotpotqa_rows(rows: Sequence[SourceRow]) -> Iterator[Converted]:
    for row in rows:
        question = row.text("question").strip()
        passages = [f"{title}: {''.join(lines).strip()}" for title, lines in _pairs(row.get("context"), "sentences")]
        if not passages:
            raise DataError(f"The context of {row.where} is missing: the columns are {row.columns}.")
        facts = _pairs(row.get("supporting_facts"), "sent_id")
        yield {
            "prompt": "\n\n".join([*passages, f"{question}\n{ANSWER_INSTRUCTION}"]),
            "ground_truth": row.text("answer"),
            "extra_info": {
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


NQ_OPEN = register_recipe(
    Recipe(
        name="nq_open",
        sentence="questions people asked a search engine, without passages; any listed answer counts",
        splits=(
            Split("train", files=("NQ-open.train.jsonl*",), optional=True),
            Split("validation", files=("NQ-open.dev.jsonl*", "NQ-open.efficientqa.dev*.jsonl*")),
        ),
        columns="question and answer (a list)",
        rows=nq_open_rows,
        hub_id="google-research-datasets/nq_open",
        hub_config="nq_open",
    )
)
HOTPOTQA = register_recipe(
    Recipe(
        name="hotpotqa",
        sentence="questions over two of ten passages that stand in the prompt; scored by the answer's words",
        splits=(
            Split("train", files=("hotpot_train*.json*",), optional=True),
            Split("validation", files=("hotpot_dev_distractor*.json*", "hotpot_distractor*.json*")),
        ),
        columns="question, answer, context and supporting_facts",
        rows=hotpotqa_rows,
        hub_id="hotpotqa/hotpot_qa",
        hub_config="distractor",
    )
)


def banking77_rows(rows: Sequence[SourceRow]) -> Iterator[Converted]:
    answers = [row.text("category", "label_text").strip() for row in rows]
    labels = sorted(set(answers))
    for row, answer in zip(rows, answers, strict=True):
        yield {
            "prompt": f"A bank's customer writes: {row.text('text').strip()}\n"
            f"Answer with the one label that fits, out of: {', '.join(labels)}.",
            "ground_truth": answer,
            "response": answer,
            "extra_info": {"labels": labels},
        }


BANKING77 = register_recipe(
    Recipe(
        name="banking77",
        sentence="customers' messages to be sorted into 77 labels; scored by the label",
        splits=(Split("train"), Split("test")),
        columns="text and category (or label_text)",
        rows=banking77_rows,
        hub_id="mteb/banking77",
    )
)


CODE_INSTRUCTION = "Answer with one Python program in a ```python block."
# Last task of each split, by the data set's own division of its 974 tasks.
MBPP_LAST = {"prompt": 10, "test": 510, "validation": 600, "train": 974}


def mbpp_rows(rows: Sequence[SourceRow]) -> Iterator[Converted]:
    """Convert the tasks of this split: one file may hold all of them."""
    for row in rows:
        task, tests = row.get("task_id"), row.get("test_list")
        if not isinstance(task, int) or not isinstance(tests, list) or not tests:
            raise DataError(f"The task_id or test_list of {row.where} is missing; columns: {row.columns}.")
        if row.split != next((name for name, last in MBPP_LAST.items() if task <= last), None):
            yield None
            continue
        text = row.text("prompt", "text").strip()
        setup = [*(row.get("test_imports") or []), row.get("test_setup_code") or ""]
        yield {
            "prompt": f"{text}\nYour program must pass tests such as:\n```python\n{tests[0]}\n```\n{CODE_INSTRUCTION}",
            "ground_truth": json.dumps({"test_list": tests, "test_imports": [line for line in setup if line]}),
            "response": _fence(row.text("code")),
            "extra_info": {"task_id": str(task)},
        }


def humaneval_rows(rows: Sequence[SourceRow]) -> Iterator[Converted]:
    names = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
    for row in rows:
        task, prompt, entry, solution, test = (row.text(name) for name in names)
        yield {
            "prompt": f"Complete this function.\n```python\n{prompt.rstrip()}\n```\n{CODE_INSTRUCTION}",
            "ground_truth": json.dumps({"test": test, "entry_point": entry, "prompt": prompt}),
            "response": _fence(prompt + solution),
            "extra_info": {"task_id": task},
        }


def _fence(program: str) -> str:
    return f"```python\n{program.strip()}\n```"


_MBPP_FILES = ("sanitized-mbpp.json", "mbpp.jsonl")
MBPP = register_recipe(
    Recipe(
        name="mbpp",
        sentence="short Python tasks with tests (sanitized MBPP), divided by task number; scored in the sandbox",
        splits=tuple(
            Split(name, files=_MBPP_FILES, optional=True) for name in ("train", "validation", "test", "prompt")
        ),
        columns="task_id, prompt (or text), code, test_list",
        rows=mbpp_rows,
        hub_id="google-research-datasets/mbpp",
        hub_config="sanitized",
    )
)
HUMANEVAL = register_recipe(
    Recipe(
        name="humaneval",
        sentence="164 Python functions to complete, for evaluation; scored in the sandbox",
        splits=(Split("test", files=("HumanEval.jsonl.gz", "HumanEval.jsonl")),),
        columns="task_id, prompt, entry_point, canonical_solution, test",
        rows=humaneval_rows,
        hub_id="openai/openai_humaneval",
        hub_config="openai_humaneval",
    )
)


PAIR_COLUMNS = "chosen and rejected"
_ROLES = {"Human": "user", "Assistant": "assistant"}
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
        if turns and turns[-1]["role"] == _ROLES[role]:
            turns[-1]["content"] += f"\n\n{content.strip()}"
        else:
            turns.append({"role": _ROLES[role], "content": content.strip()})
    return turns


_PAIR_SPLITS = (
    Split("train", files=("*train.jsonl.gz", "*train.jsonl"), optional=True),
    Split("test", files=("*test.jsonl.gz", "*test.jsonl"), optional=True),
)
HH_RLHF = register_recipe(
    Recipe(
        name="hh_rlhf",
        sentence="conversations with a preferred and a rejected answer: pairs for a reward model",
        splits=_PAIR_SPLITS,
        columns=PAIR_COLUMNS,
        rows=pair_rows,
        hub_id="Anthropic/hh-rlhf",
    )
)
HH_RLHF_SFT = register_recipe(
    Recipe(
        name="hh_rlhf_sft",
        sentence="the preferred conversations of hh_rlhf as messages: multi-turn rows for SFT",
        splits=_PAIR_SPLITS,
        columns=PAIR_COLUMNS,
        rows=conversation_rows,
        hub_id="Anthropic/hh-rlhf",
        data_source="hh_rlhf",
    )
)
