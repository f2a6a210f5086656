"""`posttrain generate`, `eval` and `reward try --model` with tools: calls are answered, shown, kept, and scored as in a
run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import scripted
from runs import run

from posttrain import cli
from posttrain.commands.evaluation.evaluate import answered_prompts
from posttrain.commands.evaluation.report import read_report
from posttrain.commands.generation import files as parts_module
from posttrain.config.trainer import DataConfig
from posttrain.data.rows import load_rows, table_of_rows
from posttrain.rollout.engines import ENGINES

FLAGS = ["--tools", "my_tools.py:add", "--max-tokens", "240"]


def call(a: int, b: int) -> str:
    return f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'a': a, 'b': b}})}</tool_call>"


def script(read: str, seed: int) -> str:
    """Adds by the tool; says what it heard only where the first number is even."""
    first, second = map(int, re.findall(r"(\d+) ?\+ ?(\d+)", read)[-1])
    if "<tool_response>" in read:
        heard = read.rpartition("<tool_response>")[2].partition("</tool_response>")[0]
        return f"so {heard}" if first % 2 == 0 else "no idea"
    return call(first, second)


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[scripted.Scripted]:
    """A folder with a tool and six sums."""
    (tmp_path / "my_tools.py").write_text(
        "def add(a: int, b: int) -> str:\n    '''The sum.'''\n    return str(a + b)\n"
    )
    rows = [
        {"prompt": f"{n}+{n + 7}=", "ground_truth": str(2 * n + 7), "data_source": "math_reasoning"} for n in range(6)
    ]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    made = scripted.use(script)
    monkeypatch.setitem(ENGINES, "native", ENGINES["scripted"])
    return made


def test_a_response_is_shown_turn_by_turn_and_the_settings_of_a_run_hold(tiny_model, engines, capsys):
    turns = "actor_rollout_ref.rollout.max_turns"
    command = ["generate", str(tiny_model), *FLAGS, "--prompt", "2+3="]
    assert cli.main([*command, "--prompt", "11+7=", f"{turns}=2"]) == 0
    said = capsys.readouterr()
    assert said.out == f"> 2+3=\n{call(2, 3)}\n  add -> 5\nso 5\n> 11+7=\n{call(11, 7)}\n  add -> 18\nno idea\n"
    assert "Tools: add; a response has up to 2 turns." in said.err
    (engine,) = engines
    later = [request for request in engine.seen if request.parent is not None]
    assert [request.parent for request in later] == [(0, 0), (1, 0)] and all(one.keep for one in engine.seen)
    assert engine.released == [request.id for request in later], "no cache is left behind"
    assert all('"name": "add"' in engine.tokenizer.decode(list(one.prompt_ids)) for one in engine.seen)
    assert cli.main([*command, f"{turns}=1"]) == 0
    assert capsys.readouterr().out == f"{call(2, 3)} [no further turn is allowed]\n"
    assert cli.main([*command, "--max-tokens", "70"]) == 0
    assert capsys.readouterr().out == f"{call(2, 3)}\n  add -> 5 [cut off by --max-tokens]\n"


@pytest.mark.slow
def test_files_have_the_calls_and_a_column_of_that_name_is_in_the_way_with_tools_only(tiny_model, engines, capsys):
    for name in ("out.jsonl", "out.parquet"):
        assert cli.main(["generate", str(tiny_model), *FLAGS, "--data", "sums.jsonl", "--n", "2", "--out", name]) == 0
        for n, row in enumerate(load_rows(Path(name)).rows):
            for text in row["tool_calls"]:
                (made,) = json.loads(text)
                wanted = {"turn": 1, "name": "add", "arguments": {"a": n, "b": n + 7}, "answer": str(2 * n + 7)}
                assert made == wanted | {"error": None}
            last = f"so {2 * n + 7}" if n % 2 == 0 else "no idea"
            assert row["own_words"] == [f"{call(n, n + 7)}\n{last}"] * 2
            assert row["responses"] == [f"{call(n, n + 7)}<tool_response>{2 * n + 7}</tool_response>{last}"] * 2
        assert cli.main(["eval", "--responses", name, "reward.num_workers=1", "--out", f"scores of {name}"]) == 0
        metrics = read_report(Path(f"scores of {name}"))["results"]["math_reasoning"]["metrics"]
        assert metrics["accuracy"]["value"] == 0.5, "what the tool said is no answer"
    rows = [{"prompt": "1+1=", "tool_calls": "mine"}]
    Path("taken.jsonl").write_text(json.dumps(rows[0]))
    again = ["generate", str(tiny_model), "--data", "taken.jsonl", "--out", "again.jsonl", "--overwrite"]
    assert cli.main([*again, *FLAGS]) == 2
    assert "has a column `tool_calls` already" in capsys.readouterr().err
    assert cli.main([*again, "--max-tokens", "4"]) == 0
    assert load_rows(Path("again.jsonl")).rows[0]["tool_calls"] == "mine"


def test_samples_of_runs_with_and_without_tools_in_one_file_are_scored_as_whole_texts():
    rows = [
        {"prompt": "1+1=", "response": text, "own_words": own, "uid": "a"} for text, own in (("2", None), ("32", "3"))
    ]
    (one,) = answered_prompts(table_of_rows(rows, name="mixed"), DataConfig())
    assert one.responses == ["2", "32"] and one.own_words == []


@pytest.mark.slow
def test_an_evaluation_scores_what_the_model_said_and_goes_on_where_it_was(tiny_model, engines, monkeypatch, capsys):
    command = ["eval", str(tiny_model), *FLAGS, "--data", "sums.jsonl", "reward.num_workers=1", "--out"]
    assert cli.main([*command, "whole"]) == 0
    report = read_report(Path("whole"))
    assert report["results"]["math_reasoning"]["metrics"]["accuracy"]["value"] == 0.5, "what the tool said is no answer"
    (sample,) = Path("whole/samples").iterdir()
    for n, row in enumerate(pq.read_table(sample).to_pylist()):
        assert row["num_turns"] == 2 and json.loads(row["tool_calls"])[0]["answer"] == str(2 * n + 7)
        assert 0 < sum(row["response_mask"]) < len(row["response_ids"])
    assert cli.main(["eval", "--responses", str(sample), "reward.num_workers=1", "--out", "again"]) == 0
    assert read_report(Path("again"))["results"]["math_reasoning"]["metrics"]["accuracy"]["value"] == 0.5

    plain = parts_module.Parts.add

    def stop(self, answers):
        plain(self, answers)
        if len(self.finished()) >= 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(parts_module, "ROWS", 1)
    monkeypatch.setattr(parts_module.Parts, "add", stop)
    assert cli.main([*command, "parts"]) == 130
    monkeypatch.setattr(parts_module.Parts, "add", plain)
    assert cli.main([*command, "parts", "actor_rollout_ref.rollout.max_turns=1"]) == 2
    assert "multi_turn was" in capsys.readouterr().err
    assert cli.main([*command, "parts"]) == 0
    assert "2 of 6 prompts were finished before" in capsys.readouterr().err
    assert read_report(Path("parts"))["results"] == report["results"]


def test_a_secret_of_a_tool_is_in_no_file_of_an_evaluation(tiny_model, engines, monkeypatch):
    Path("my_tools.py").write_text(
        "def add(a: int, b: int, *, api_key: str) -> str:\n    '''The sum.'''\n    return f'{a + b} by {api_key}'\n"
    )
    key = "actor_rollout_ref.rollout.tool_config.add.api_key=sk-very-secret"
    monkeypatch.setattr(parts_module.Parts, "remove", lambda self: None)
    command = ["eval", str(tiny_model), *FLAGS, "--data", "sums.jsonl", "reward.num_workers=1", "--out", "out", key]
    assert cli.main(command) == 0
    files = [path for path in Path("out").rglob("*") if path.is_file()]
    assert len(files) >= 4 and not [path for path in files if b"sk-very-secret" in path.read_bytes()]


@pytest.mark.slow
def test_a_checkpoint_brings_the_tools_of_its_run(tiny_model, sums, engines, tmp_path, capsys):
    more = {
        "actor_rollout_ref__rollout__multi_turn": True,
        "actor_rollout_ref__rollout__tools": ["my_tools.py:add"],
        "data__max_prompt_length": 240,
        "data__max_response_length": 240,
        "trainer__total_training_steps": 1,
    }
    result = run(tiny_model, sums, tmp_path / "runs", **more)
    capsys.readouterr()
    checkpoint = str(Path(result.path) / "checkpoints" / "global_step_1")
    samples = Path(result.path) / "samples" / "step_1.parquet"
    rows = pq.read_table(samples).to_pylist()
    assert all("<tool_response>" in row["response"] and "<tool_response>" not in row["own_words"] for row in rows)
    assert {row["own_words"].rpartition("\n")[2] for row in rows} >= {"no idea"}
    assert cli.main(["eval", "--responses", str(samples), "reward.num_workers=1", "--out", "own"]) == 0
    scored = read_report(Path("own"))["results"]["math_reasoning"]["metrics"]["reward"]["value"]
    odd = sum(row["own_words"].endswith("no idea") for row in rows) / len(rows)
    assert odd > 0 and abs(scored - (1 - odd)) < 1e-9, "as the run scored: what the tool said is no answer"
    capsys.readouterr()
    assert cli.main(["generate", checkpoint, "--prompt", "2+3="]) == 0
    assert capsys.readouterr().out == f"{call(2, 3)}\n  add -> 5\nso 5\n"
    assert cli.main(["reward", "try", "builtin", "sums.jsonl", "--model", checkpoint, "-k", "1"]) in (0, 1)
    said = capsys.readouterr()
    assert "Tools: add" in said.err and "mean 0.500, min 0, max 1; 1: 3, 0: 3" in said.out, "as in an evaluation"
