"""The GSM8K recipe: what its rows hold, which copies it reads, what it says without one. Every row is made here."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from posttrain import cli
from posttrain.config.trainer import DataConfig
from posttrain.data.dataset import PromptDataset
from posttrain.data.recipes.recipe import prepare
from posttrain.data.recipes.tasks import GSM8K, NUMBER_INSTRUCTION
from posttrain.data.rows import DataError, how_to_make, load_rows, resolve_files
from posttrain.rewards.scorers import score_by_source

ROOT = Path(__file__).resolve().parents[2]
RAW = {
    "train": [
        {
            "question": "Ann has 1,000 nuts and gets 234. How many? ",
            "answer": "1,000 + 234 = <<1+1=2>>1,234\n#### 1,234",
        },
        {"question": "Bo owes 7 and pays 5. Balance?", "answer": "5 - 7 = -2\n#### -2"},
        {"question": "Half of 5?", "answer": "5 / 2 = 2.5\n#### 2.5"},
    ],
    "test": [{"question": "2 + 2?", "answer": "It is 4.\n#### 4"}],
}


def write_jsonl(path: Path, rows: list[dict[str, str]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def write_json(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text(json.dumps(rows))


def write_parquet(path: Path, rows: list[dict[str, str]]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with the raw data set as JSON lines."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for split, rows in RAW.items():
        write_jsonl(folder / f"{split}.jsonl", rows)
    return folder


def prepared(folder: Path, split: str = "train") -> list[dict]:
    return load_rows(folder / f"{split}.parquet").rows


def test_a_row_has_prompt_with_instruction_truth_response_source_and_place(copy, tmp_path):
    prepare(GSM8K, copy, tmp_path / "out")
    rows = prepared(tmp_path / "out")
    assert rows[0] == {
        "prompt": "Ann has 1,000 nuts and gets 234. How many?\n" + NUMBER_INSTRUCTION,
        "ground_truth": "1234",
        "response": "1,000 + 234 = <<1+1=2>>1,234\n#### 1,234",
        "data_source": "gsm8k",
        "extra_info": {"index": 0, "split": "train"},
    }
    assert "`#### N`" in NUMBER_INSTRUCTION
    assert [row["ground_truth"] for row in rows] == ["1234", "-2", "2.5"]
    assert prepared(tmp_path / "out", "test")[0]["extra_info"] == {"index": 0, "split": "test"}


def test_every_truth_scores_1_for_the_rows_own_solution_and_0_for_another_rows(copy, tmp_path):
    prepare(GSM8K, copy, tmp_path / "out")
    rows = prepared(tmp_path / "out")
    scores = [
        [score_by_source(a["data_source"], b["response"], a["ground_truth"])["score"] for b in rows]  # type: ignore
        for a in rows
    ]
    assert scores == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]


def test_the_rows_load_as_prompts_with_truth_and_no_note_about_missing_columns(copy, tmp_path, tokenizer):
    prepare(GSM8K, copy, tmp_path / "out")
    data = PromptDataset(str(tmp_path / "out" / "train.parquet"), tokenizer, DataConfig())
    assert (len(data), data.data_sources, data.rows_without_truth, data.notes) == (3, ["gsm8k"], 0, [])
    assert data[1]["ground_truth"] == "-2" and data.column("index") == [0, 1, 2]


def test_the_files_land_in_home_data_gsm8k_unless_told_otherwise(copy, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cli.main(["data", "gsm8k", "--from", str(copy)]) == 0
    folder = tmp_path / "home" / "data" / "gsm8k"
    assert sorted(path.name for path in folder.iterdir()) == ["test.parquet", "train.parquet"]
    assert capsys.readouterr().out == f"{folder}/train.parquet: 3 rows\n{folder}/test.parquet: 1 rows\n"
    assert resolve_files(["$HOME/data/gsm8k/train.parquet", "$HOME/data/gsm8k/test.parquet"])
    assert cli.main(["data", "gsm8k", "--from", str(copy), "--out", str(tmp_path / "other")]) == 0
    assert len(prepared(tmp_path / "other")) == 3


def test_the_example_script_runs_from_any_folder(copy, tmp_path):
    command = [sys.executable, str(ROOT / "examples/data_preprocess/gsm8k.py"), "--from", str(copy)]
    environment = {**os.environ, "HOME": str(tmp_path / "home")}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert len(prepared(tmp_path / "home/data/gsm8k")) == 3


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("{}.jsonl.gz", write_jsonl),
        ("{}.json", write_json),
        ("{}.parquet", write_parquet),
        ("{}-00000-of-00001.parquet", write_parquet),
        ("main/{}-00000-of-00001.parquet", write_parquet),
    ],
)
def test_copies_are_read_in_every_customary_form(name, write, tmp_path):
    source = tmp_path / "source"
    (source / "main").mkdir(parents=True)
    for split, rows in RAW.items():
        write(source / name.format(split), rows)
    assert [made.rows for made in prepare(GSM8K, source, tmp_path / "out")] == [3, 1]


def test_the_datasets_package_serves_where_it_is_installed(tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return RAW[split]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert [made.rows for made in prepare(GSM8K, None, tmp_path)] == [3, 1]
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]


def test_without_datasets_the_hubs_files_are_downloaded(tmp_path, monkeypatch):
    import huggingface_hub

    def download(repo, name, repo_type):
        assert (repo, repo_type) == ("openai/gsm8k", "dataset")
        path = tmp_path / name.replace("/", "_")
        write_parquet(path, RAW[name.removeprefix("main/").partition("-")[0]])
        return str(path)

    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert [made.rows for made in prepare(GSM8K, None, tmp_path / "out")] == [3, 1]


def test_offline_the_error_names_from_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    import huggingface_hub

    def fails(*args, **named):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fails)
    assert cli.main(["data", "gsm8k", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "openai/gsm8k" in error and "ConnectionError: no route)" in error and "--from FOLDER" in error
    assert not (tmp_path / "out").exists()


def test_an_answer_without_a_number_names_its_row_and_the_old_files_stay(copy, tmp_path):
    prepare(GSM8K, copy, tmp_path / "out")
    before = (tmp_path / "out/train.parquet").read_bytes()
    write_jsonl(copy / "test.jsonl", [*RAW["test"], {"question": "3 + 3?", "answer": "six"}])
    with pytest.raises(DataError, match=r"answer of row 2 of .*test\.jsonl does not end in `#### N`"):
        prepare(GSM8K, copy, tmp_path / "out")
    assert (tmp_path / "out/train.parquet").read_bytes() == before
    assert len(list((tmp_path / "out").iterdir())) == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"q": "2 + 2?", "answer": "#### 4"}], r"question of row 1 .* is missing.*this row has q, answer"),
        ([{"question": "2 + 2?", "answer": None}], r"answer of row 1 .* is missing"),
        ([{"prompt": "2 + 2?", "ground_truth": "4"}], "holds prepared rows already"),
    ],
)
def test_a_copy_with_other_columns_is_answered(rows, message, copy, tmp_path):
    write_jsonl(copy / "train.jsonl", rows)
    with pytest.raises(DataError, match=message):
        prepare(GSM8K, copy, tmp_path / "out")


def test_a_missing_folder_or_split_is_named_and_a_source_is_never_replaced(copy, tmp_path):
    with pytest.raises(DataError, match=r"there is no folder .*nowhere"):
        prepare(GSM8K, tmp_path / "nowhere", tmp_path / "out")
    (copy / "test.jsonl").unlink()
    with pytest.raises(DataError, match=r"holds no test split.*test\.jsonl, .*test\.parquet"):
        prepare(GSM8K, copy, tmp_path / "out")
    write_parquet(copy / "test.parquet", RAW["test"])
    with pytest.raises(DataError, match=r"test\.parquet is read and would be replaced"):
        prepare(GSM8K, copy, copy)
    assert prepared(copy, "test") == RAW["test"]


def test_the_hints_about_missing_files_are_commands_that_make_them(copy, tmp_path):
    wanted = tmp_path / "gsm8k" / "train.parquet"
    hint = how_to_make(str(wanted))
    command = hint.split("`")[1].split()
    assert command[:3] == ["posttrain", "data", "gsm8k"] and "examples/data_preprocess/gsm8k.py" in hint
    assert cli.main([*command[1:], "--from", str(copy)]) == 0 and wanted.is_file()
    with pytest.raises(DataError) as error:
        resolve_files([tmp_path / "else/gsm8k/train.parquet"])
    assert how_to_make(str(tmp_path / "else/gsm8k/train.parquet")) in str(error.value)
