"""MATH (Hendrycks et al. 2021, arXiv 2103.03874) and MATH-500: competition problems with answers in `\\boxed{}`.

A row is {"prompt": problem and how to end the answer, "ground_truth": "\\frac{1}{2}", "response": the solution,
"data_source": "math" or "math500", "extra_info": {"index", "split", "subject", "level"}}.
"""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.data.recipes.recipe import Recipe, Row, SkippedRow, Split, text_of
from posttrain.data.rows import RowTable

INSTRUCTION = "Think step by step and put your final answer within \\boxed{}."
COLUMNS = "problem, solution and (where there is one) answer"


def _rows(table: RowTable, split: str, source: str) -> Iterator[Row | SkippedRow]:
    for number, row in enumerate(table.rows):
        problem, solution = (text_of(table, number, COLUMNS, name) for name in ("problem", "solution"))
        answer = row.get("answer") or last_boxed(solution)
        if not answer:
            yield SkippedRow("the solution boxes no answer")
            continue
        subject, level = row.get("subject") or row.get("type"), row.get("level")
        yield {
            "prompt": f"{problem.strip()}\n{INSTRUCTION}",
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
    columns=COLUMNS,
    rows=lambda table, split: _rows(table, split, "math"),
    hub_id="DigitalLearningGmbH/MATH-lighteval",
)
MATH500 = Recipe(
    name="math500",
    sentence="500 problems of MATH's test set, for evaluation; scored by the boxed answer",
    splits=(Split("test", files=("math500.jsonl",)),),
    columns=COLUMNS,
    rows=lambda table, split: _rows(table, split, "math500"),
    hub_id="HuggingFaceH4/MATH-500",
)
