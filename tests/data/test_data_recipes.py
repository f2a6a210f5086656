"""Every recipe on rows made here: what goes in comes out, and the truth of a row earns the full score."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from posttrain import cli
from posttrain.config.trainer import DataConfig
from posttrain.data.dataset import PromptDataset
from posttrain.data.recipes import RECIPES
from posttrain.data.recipes.recipe import prepare
from posttrain.data.recipes.tasks import _turns, last_boxed
from posttrain.data.rows import DataError, how_to_make, load_rows
from posttrain.rewards.scorers import code, score_by_source
from posttrain.sandbox import Sandbox
from tests.machine import warm

ROOT = Path(__file__).resolve().parents[2]
ADD = "def add(a, b):\n    return a + b"
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def add(a, b):\n    """Add."""\n',
    "entry_point": "add",
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
}
HOTPOT = {
    "question": "Who wrote it?",
    "answer": "Ann Lee",
    "type": "bridge",
    "level": "hard",
    "supporting_facts": {"title": ["It", "Ann", "It"], "sent_id": [0, 0, 1]},
    "context": {"title": ["It", "Ann"], "sentences": [["It is a book.", " Ann wrote it."], ["Ann Lee is Ann."]]},
}
PAIR = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: A cake?\n\nAssistant:"
RAW: dict[str, dict[str, list[dict[str, Any]]]] = {
    "gsm8k": {
        "train.jsonl": [{"question": "2 + 2?", "answer": "4 it is.\n#### 4"}] * 3,
        "test.jsonl": [{"question": "1 + 1?", "answer": "#### 2"}],
    },
    "math": {
        "train.jsonl": [
            {"problem": "Half?", "solution": "So \\boxed{\\frac{1}{2}}.", "level": "Level 2", "type": "Algebra"},
            {"problem": "Old?", "solution": "It is $\\boxed 3$."},
            {"problem": "Open?", "solution": "Nobody knows."},
        ],
        "test.jsonl": [{"problem": "Set?", "solution": "\\boxed{\\{1, 2\\}}"}],
    },
    "math500": {"math500.jsonl": [{"problem": "p", "solution": "\\boxed{x}", "answer": "x^2", "level": 3}] * 2},
    "mbpp": {
        "sanitized-mbpp.json": [
            {
                "task_id": task,
                "prompt": "Add.",
                "code": ADD,
                "test_imports": ["import math"],
                "test_list": ["assert add(1, 2) == 3", "assert add(math.floor(1.5), 1) == 2"],
            }
            for task in (2, 11, 510, 511, 601, 974)
        ]
    },
    "humaneval": {"HumanEval.jsonl.gz": [HUMANEVAL]},
    "nq_open": {
        "NQ-open.dev.jsonl": [
            {"question": "who wrote it", "answer": ["Ann", "Ann Lee"]},
            {"question": "what?", "answer": ["--"]},
        ]
    },
    "hotpotqa": {"hotpot_distractor_sample.jsonl": [HOTPOT]},
    "banking77": {
        "train.csv": [{"text": "Where, oh where?", "category": "card_arrival"}, {"text": "Hm", "category": "top_up"}],
        "test.csv": [{"text": "When?", "category": "card_arrival"}],
    },
    "hh_rlhf": {
        "harmless-base_test.jsonl.gz": [
            {"chosen": f"{PAIR} Yes.", "rejected": f"{PAIR} No.\n\nHuman: Why?\n\nAssistant: Because."},
            {"chosen": f"{PAIR} ", "rejected": f"{PAIR} No."},
        ]
    },
}
RAW["hh_rlhf_sft"] = RAW["hh_rlhf"]
ROWS = {  # split -> rows that come out
    "gsm8k": {"train": 3, "test": 1},
    "math": {"train": 2, "test": 1},
    "math500": {"test": 2},
    "mbpp": {"train": 2, "validation": 1, "test": 2, "prompt": 1},
    "humaneval": {"test": 1},
    "nq_open": {"validation": 1},
    "hotpotqa": {"validation": 1},
    "banking77": {"train": 2, "test": 1},
    "hh_rlhf": {"test": 1},
    "hh_rlhf_sft": {"test": 1},
}
SCRIPTS = {"math": "math_dataset", "hh_rlhf_sft": "multiturn"}
SCORED = [name for name in RECIPES if not name.startswith("hh_rlhf")]


def write_copy(folder: Path, name: str) -> Path:
    """A copy of the data set, under the names of its own files."""
    folder.mkdir(parents=True)
    for file, rows in RAW[name].items():
        path = folder / file
        if path.suffix == ".csv":
            with path.open("w", newline="") as out:
                writer = csv.DictWriter(out, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows))
        else:
            text = "".join(json.dumps(row) + "\n" for row in rows).encode()
            path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return folder


@pytest.fixture(scope="module")
def sandboxed():
    """Skips where the kernel lets no program be isolated."""
    with warm(Sandbox()):
        pass
    yield
    code.close()


@pytest.fixture
def made(tmp_path: Path):
    """`made(recipe)`: its prepared rows by split."""

    def run(name: str) -> dict[str, list[dict[str, Any]]]:
        copy = write_copy(tmp_path / "copy" / name, name)
        files = prepare(RECIPES[name], copy, tmp_path / "out" / name)
        return {one.path.stem: load_rows(one.path).rows for one in files}

    return run


@pytest.mark.parametrize("name", RECIPES)
def test_what_goes_in_comes_out_and_what_is_left_out_is_said(name, made, tmp_path, capsys):
    assert {split: len(rows) for split, rows in made(name).items()} == ROWS[name]
    capsys.readouterr()
    assert cli.main(["data", name, "--from", str(tmp_path / "copy" / name), "--out", str(tmp_path / "again")]) == 0
    said = capsys.readouterr().out
    assert all(f"{split}.parquet: {count} rows" in said for split, count in ROWS[name].items())
    raw, kept = sum(map(len, RAW[name].values())), sum(ROWS[name].values())
    assert sum(map(int, re.findall(r"(\d+) left out", said))) == raw - kept


@pytest.mark.parametrize("name", SCORED)
def test_the_truth_scores_1_in_the_form_that_the_prompt_asks_for_and_another_answer_0(name, made, request):
    if name in ("mbpp", "humaneval"):
        request.getfixturevalue("sandboxed")
    rows = [row for split in made(name).values() for row in split]
    for row in rows:
        right = row.get("response") or f"I think <answer>{row['ground_truth'][0]}</answer>"
        if name == "hotpotqa":
            right = f"<answer>{row['ground_truth']}</answer>"
        if name == "math500":
            right = f"\\boxed{{{row['ground_truth']}}}"
        for response, wanted in ((right, 1.0), ("I do not know.", 0.0)):
            found = score_by_source(row["data_source"], response, row["ground_truth"], row["extra_info"])
            assert (found["score"] if isinstance(found, dict) else found) == wanted, (name, response)


@pytest.mark.parametrize("name", SCORED)
def test_a_run_reads_the_rows_with_truth_source_and_place(name, made, tmp_path, tokenizer):
    made(name)
    for split, count in ROWS[name].items():
        path = tmp_path / "out" / name / f"{split}.parquet"
        data = PromptDataset(path, tokenizer, DataConfig(max_prompt_length=4096))
        assert (len(data), data.data_sources, data.rows_without_truth) == (count, [name], 0)
        assert not data.notes and set(data.column("split")) == {split}


def test_a_program_that_only_repeats_the_shown_test_fails_the_hidden_ones(made, sandboxed):
    mbpp = made("mbpp")["train"][0]
    assert "add(1, 2)" in mbpp["prompt"] and "math.floor" not in mbpp["prompt"]
    repeated = "def add(a, b):\n    return 3"
    found = score_by_source("mbpp", repeated, mbpp["ground_truth"])
    assert isinstance(found, dict) and found["score"] == 0.0


def test_the_parts_of_each_data_set_stand_where_they_belong(made):
    assert made("math")["train"][0]["ground_truth"] == "\\frac{1}{2}"
    assert made("math500")["test"][0]["ground_truth"] == "x^2"
    assert made("nq_open")["validation"][0]["ground_truth"] == ["Ann", "Ann Lee"]
    hotpot = made("hotpotqa")["validation"][0]
    assert "It: It is a book. Ann wrote it.\n\nAnn: Ann Lee is Ann.\n\nWho wrote it?" in hotpot["prompt"]
    assert hotpot["extra_info"]["supporting"] == ["It", "Ann"]
    banking = made("banking77")["train"][0]
    assert "card_arrival, top_up" in banking["prompt"] and banking["extra_info"]["labels"] == ["card_arrival", "top_up"]
    both = score_by_source("banking77", "card_arrival or top_up", "card_arrival", banking["extra_info"])
    assert isinstance(both, dict) and both["score"] == 0.0


def test_preference_pairs_share_their_prompt_and_differ_in_the_last_answer(made):
    row = made("hh_rlhf")["test"][0]
    assert row["prompt"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "A cake?"},
    ]
    assert row["chosen"] == "Yes." and row["rejected"] == "No.\n\nHuman: Why?\n\nAssistant: Because."
    messages = made("hh_rlhf_sft")["test"][0]["messages"]
    assert messages == [*row["prompt"], {"role": "assistant", "content": "Yes."}]


def test_turns_of_one_role_in_a_row_become_one():
    turns = _turns("\n\nHuman: a\n\nHuman: b\n\nAssistant: c")
    assert turns == [{"role": "user", "content": "a\n\nb"}, {"role": "assistant", "content": "c"}]


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("\\boxed{a} then \\boxed{\\frac{1}{{2}}}.", "\\frac{1}{{2}}"),
        ("\\fbox{7}", "7"),
        ("$\\boxed 3$", "3"),
        ("\\boxed{open", None),
        ("no box", None),
    ],
)
def test_the_last_box_with_nested_braces(text, box):
    assert last_boxed(text) == box


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "gsm8k"])
def test_each_example_script_writes_parquet_from_a_local_copy(name, tmp_path):
    script = ROOT / "examples" / "data_preprocess" / f"{SCRIPTS.get(name, name)}.py"
    copy = write_copy(tmp_path / "copy", name)
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "PYTHONPATH": ""}
    ran = subprocess.run(
        [sys.executable, str(script), "--from", str(copy)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    names = sorted(path.name for path in (tmp_path / "home" / "data" / name).iterdir())
    assert names == sorted(f"{split}.parquet" for split in ROWS[name])


def test_every_recipe_has_a_script_and_every_script_a_recipe():
    scripts = {path.stem for path in (ROOT / "examples" / "data_preprocess").glob("*.py")}
    assert scripts == {SCRIPTS.get(name, name) for name in RECIPES}


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "gsm8k"])
def test_the_hints_about_missing_files_name_the_recipe(name, tmp_path):
    wanted = tmp_path / name / "test.parquet"
    command = f"`posttrain data {name} --out {wanted.parent}`"
    assert command in how_to_make(str(wanted))
    with pytest.raises(DataError, match=re.escape(command)):
        load_rows(wanted)


def test_recipes_are_loaded_for_a_hint_and_not_before():
    code = """
import sys
from posttrain.data.rows import how_to_make
before = [name for name in sys.modules if name.startswith("posttrain.data.recipes.")]
print(before, "posttrain data hotpotqa" in how_to_make("data/hotpotqa/train.parquet"), "torch" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[] True False\n"


def test_the_command_lists_every_recipe_with_its_sentence(capsys):
    with pytest.raises(SystemExit):
        cli.main(["data", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for recipe in RECIPES.values():
        assert f"{recipe.name} {recipe.sentence}" in shown


def test_a_file_serves_instead_of_a_folder_and_a_wrong_one_is_answered(tmp_path):
    copy = write_copy(tmp_path / "copy", "humaneval")
    file = (copy / "HumanEval.jsonl.gz").rename(copy / "mine.jsonl.gz")
    assert prepare(RECIPES["humaneval"], file, tmp_path / "out")[0].rows == 1
    with pytest.raises(DataError, match=r"holds no test split.*HumanEval\.jsonl"):
        prepare(RECIPES["humaneval"], copy, tmp_path / "out")
    with pytest.raises(DataError, match=r"task_id or test_list of row 1 .* is missing"):
        prepare(RECIPES["mbpp"], file, tmp_path / "out")
    with pytest.raises(DataError, match="do not begin with the same question"):
        other = tmp_path / "test.jsonl"
        other.write_text(json.dumps({"chosen": PAIR + " a", "rejected": "\n\nHuman: Else\n\nAssistant: b"}))
        prepare(RECIPES["hh_rlhf"], other, tmp_path / "out")


def test_the_hub_is_asked_by_config_and_split_and_its_parquet_branch_serves_without_datasets(tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return RAW["nq_open"]["NQ-open.dev.jsonl"]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    prepare(RECIPES["nq_open"], None, tmp_path)
    hub = "google-research-datasets/nq_open"
    assert asked == [(hub, "nq_open", "train"), (hub, "nq_open", "validation")]

    import huggingface_hub
    import pyarrow
    import pyarrow.parquet

    def download(repo, name, repo_type, revision):
        path = tmp_path / name.replace("/", "_")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RAW["math500"]["math500.jsonl"]), path)
        return str(path)

    files = ["default/test/0001.parquet", "default/test/0000.parquet", "default/train/0000.parquet"]
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo, **where: files)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert prepare(RECIPES["math500"], None, tmp_path / "hub")[0].rows == 4


def test_convert_names_columns_keeps_the_others_and_answers_what_is_missing(tmp_path, capsys):
    rows = [{"Q": "2 + 2?", "A": 4, "topic": "sums"}, {"Q": "3 + 3?", "A": 6, "topic": "sums"}]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["data", "convert", str(file), "--prompt-key", "Q", "--answer-key", "A"]
    assert cli.main([*command, "--data-source", "math_reasoning"]) == 0
    assert "mine.converted.parquet: 2 rows" in capsys.readouterr().out
    made = load_rows(tmp_path / "mine.converted.parquet").rows
    assert made[1] == {
        "prompt": "3 + 3?",
        "ground_truth": "6",
        "data_source": "math_reasoning",
        "extra_info": {"index": 1, "topic": "sums"},
    }
    for extra, message in (
        (["--out", str(tmp_path / "x.txt")], "suffix"),
        (["--answer-key", "B"], "--answer-key B: row 1 of"),
        (["--prompt-key", "P"], "--prompt-key P: row 1 of"),
    ):
        assert cli.main([*command, *extra]) == 2
        assert message in capsys.readouterr().err
