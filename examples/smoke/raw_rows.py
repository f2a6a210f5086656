"""A few rows of each data set under the names and in the form of its own files: with SMOKE=1 the scripts of
examples/data_preprocess prepare these instead of downloading."""

from __future__ import annotations

import csv
import gzip
import json
import os
import tempfile
from pathlib import Path
from typing import Any

_CHAT = "\n\nHuman: How do I boil an egg?\n\nAssistant:"
_PREFERENCES = [{"chosen": f"{_CHAT} Eight minutes in boiling water.", "rejected": f"{_CHAT} I do not know."}]
_ADD = {"code": "def add(a, b):\n    return a + b", "test_imports": [], "test_list": ["assert add(1, 2) == 3"]}
RAW: dict[str, dict[str, list[dict[str, Any]]]] = {
    "gsm8k": {
        "train.jsonl": [{"question": "Two apples and two pears?", "answer": "2 + 2 = 4\n#### 4"}] * 4,
        "test.jsonl": [{"question": "One apple and one pear?", "answer": "1 + 1 = 2\n#### 2"}],
    },
    "math": {
        "train.jsonl": [{"problem": "Half of 1?", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "level": "Level 1"}]
        * 4,
        "test.jsonl": [{"problem": "Twice 3?", "solution": "It is $\\boxed{6}$.", "level": "Level 1"}],
    },
    "math500": {"math500.jsonl": [{"problem": "Twice 3?", "solution": "$\\boxed{6}$", "answer": "6", "level": 1}]},
    "mbpp": {"sanitized-mbpp.json": [{"task_id": n, "prompt": "Add two numbers.", **_ADD} for n in (2, 11, 511, 601)]},
    "humaneval": {
        "HumanEval.jsonl.gz": [
            {
                "task_id": "HumanEval/0",
                "prompt": 'def add(a, b):\n    """Add."""\n',
                "entry_point": "add",
                "canonical_solution": "    return a + b\n",
                "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
            }
        ]
    },
    "nq_open": {"NQ-open.dev.jsonl": [{"question": "who wrote faust", "answer": ["Goethe", "J. W. von Goethe"]}]},
    "hotpotqa": {
        "hotpot_dev_distractor_v1.json": [
            {
                "question": "Where was the author of Faust born?",
                "answer": "Frankfurt",
                "type": "bridge",
                "level": "hard",
                "supporting_facts": {"title": ["Faust", "Goethe"], "sent_id": [0, 0]},
                "context": {
                    "title": ["Faust", "Goethe"],
                    "sentences": [["Faust is a play by Goethe."], ["Goethe was born in Frankfurt."]],
                },
            }
        ]
    },
    "banking77": {
        "train.csv": [{"text": "Where is my card?", "category": "card_arrival"}, {"text": "Hm", "category": "top_up"}],
        "test.csv": [{"text": "When will it come?", "category": "card_arrival"}],
    },
    "hh_rlhf": {"harmless-base_train.jsonl.gz": _PREFERENCES, "harmless-base_test.jsonl.gz": _PREFERENCES},
}
RAW["hh_rlhf_sft"] = RAW["hh_rlhf"]


def smoke(name: str) -> list[str]:
    """Arguments that make `posttrain data NAME` prepare the rows above into a new folder; none without SMOKE=1."""
    if os.environ.get("SMOKE") != "1":
        return []
    folder = Path(os.environ.get("SMOKE_OUT") or tempfile.mkdtemp())
    (folder / "copy").mkdir(parents=True, exist_ok=True)
    for file, rows in RAW[name].items():
        _write(folder / "copy" / file, rows)
    return ["--from", str(folder / "copy"), "--out", str(folder / name)]


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
