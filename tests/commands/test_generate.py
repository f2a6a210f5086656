"""`posttrain generate`: what it prints and writes, that it goes on when killed, and what each setting does."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from runs import run

from posttrain import cli
from posttrain.commands.generation import command as generate_command
from posttrain.commands.generation import files as parts_module
from posttrain.commands.generation import session as models
from posttrain.commands.generation.command import settings_folder
from posttrain.commands.generation.settings import Settings, read_settings
from posttrain.data.rows import load_rows
from posttrain.errors import UserError
from posttrain.trainer import main_generation

KILLED = """
    import os, signal, sys
    from posttrain.commands.generation import files
    from posttrain import cli

    files.ROWS, plain, seen = 2, files.Parts.add, []

    def add(self, answers):
        seen.append(answers)
        if len(seen) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        plain(self, answers)

    files.Parts.add = add
    cli.main({args!r})
"""


@pytest.fixture(scope="module")
def lively(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny untrained model with large weights: what it writes depends on its prompt."""
    from posttrain.models.embedded import write_model

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return write_model(tmp_path_factory.mktemp("models") / "lively", **shape, initializer_range=0.5, seed=3)


@pytest.fixture
def generate(lively: Path, sums: dict[str, Path], tmp_path: Path):
    """`generate(*args)`: responses of the lively model to the 12 test sums, by row."""

    def generated(*args: str, out: str = "out.jsonl", model: Path = lively) -> list[list[str]]:
        path = tmp_path / out
        command = ["generate", str(model), "--data", str(sums["test"]), "--out", str(path), "--overwrite"]
        assert cli.main([*command, "--max-tokens", "6", *args]) == 0
        return [row["responses"] for row in load_rows(path).rows]

    return generated


def test_a_prompt_is_answered_on_standard_output_with_the_chat_template_unless_raw(lively, capsys):
    command = ["generate", str(lively), "--prompt", "2 + 2 = ?", "--max-tokens", "5", "--temperature", "2"]
    assert cli.main(command) == 0
    chat = capsys.readouterr()
    assert (
        chat.out.endswith("[cut off by --max-tokens]\n") and "tokens/s" in chat.err and "ground_truth" not in chat.err
    )
    assert cli.main([*command, "--raw"]) == 0
    assert capsys.readouterr().out != chat.out
    assert cli.main([*command, "--prompt", "another", "--n", "2"]) == 0
    shown = capsys.readouterr().out
    assert "> 2 + 2 = ?\n--- 1 of 2\n" in shown and "> another\n" in shown and shown.count("--- 2 of 2") == 2


def test_a_prompt_without_room_is_told_what_leaves_more(lively, capsys):
    command = ["generate", str(lively), "--prompt", "1" * 300]
    assert cli.main(command) == 2
    assert "what the model's positions leave beside --max-tokens 256; a smaller one leaves more" in (
        capsys.readouterr().err
    )
    assert cli.main([*command, "--max-tokens", "8"]) == 0
    assert cli.main([*command, "data.max_prompt_length=64"]) == 2
    assert "It was not set" not in capsys.readouterr().err


def test_the_file_has_the_datas_rows_and_columns_and_formats_agree(generate, sums, tmp_path):
    lines, table = generate("--n", "3"), generate("--n", "3", out="out.parquet")
    assert lines == table and len(lines) == 12 and all(len(set(one)) == 3 for one in lines)
    rows, data = load_rows(tmp_path / "out.parquet").rows, json.loads(sums["test"].read_text())
    assert [{name: row[name] for name in data[0]} for row in rows] == data
    assert rows[0]["finish_reasons"] == ["length"] * 3 and rows[0]["response_tokens"] == [6, 6, 6]
    assert not list(tmp_path.glob("*.parts"))


def test_a_killed_command_keeps_finished_prompts_and_ends_with_the_same_file(generate, lively, sums, tmp_path, forked):
    generate("--n", "2", out="straight.jsonl")
    out = tmp_path / "killed.jsonl"
    args = ["generate", str(lively), "--data", str(sums["test"]), "--out", str(out), "--n", "2"]
    args += ["--max-tokens", "6", "actor_rollout_ref.rollout.max_num_seqs=2"]
    killed = forked.run(textwrap.dedent(KILLED).format(args=args))
    assert killed.returncode == -9, killed.stderr[-2000:]
    folder = tmp_path / "killed.jsonl.parts"
    assert not out.exists() and len(list(folder.glob("part_*.parquet"))) == 2
    assert cli.main(args) == 0
    assert out.read_bytes() == (tmp_path / "straight.jsonl").read_bytes()
    assert not folder.exists()


def test_what_was_finished_is_not_generated_again(generate, lively, sums, tmp_path, monkeypatch, capsys):
    wanted = generate("--n", "2")

    def stop(self, answers):
        plain(self, answers)
        if len(self.finished()) >= 4:
            raise KeyboardInterrupt

    plain = parts_module.Parts.add
    monkeypatch.setattr(parts_module, "ROWS", 2)
    monkeypatch.setattr(parts_module.Parts, "add", stop)
    args = ["generate", str(lively), "--data", str(sums["test"]), "--out", str(tmp_path / "two.jsonl"), "--n", "2"]
    args += ["--max-tokens", "6"]
    assert cli.main(args) == 130
    monkeypatch.setattr(parts_module.Parts, "add", plain)
    capsys.readouterr()
    assert cli.main([*args, "--temperature", "0.5"]) == 2
    assert "temperature was 1.0, is 0.5" in capsys.readouterr().err
    assert cli.main(args) == 0
    said = capsys.readouterr().err
    assert "4 of 12 prompts were finished before" in said and "16 responses" in said
    assert [row["responses"] for row in load_rows(tmp_path / "two.jsonl").rows] == wanted


def test_a_sample_depends_on_its_seed_alone(generate):
    whole = generate("--n", "2")
    assert generate("--n", "2", "--limit", "3") == whole[:3]
    assert generate("--n", "2", "actor_rollout_ref.rollout.max_num_seqs=1") == whole
    assert [one[:1] for one in whole] == generate("--n", "1", "--temperature", "1")
    assert generate("--n", "2", "--seed", "5") != whole
    assert generate("--engine", "hf", "--n", "2") == whole


def test_each_sampling_setting_acts(generate):
    greedy, sampled = generate(), generate("--temperature", "1")
    assert greedy != sampled
    for one in (["--top-k", "1"], ["--top-p", "0.000001"], ["--min-p", "1"], ["--temperature", "0.0001"]):
        assert generate("--temperature", "1", *one) == greedy, one
    assert generate("--repetition-penalty", "5") != greedy
    row, text = next((row, text) for row, [text] in enumerate(greedy) if len(text) > 1 and text[0] not in text[1:])
    assert generate("--stop", text[0])[row] == [text[0]]
    shorter = generate("--max-tokens", "2")
    assert shorter != greedy and all(whole.startswith(cut[:1]) for [whole], [cut] in zip(greedy, shorter, strict=True))
    assert generate("--system-prompt", "Be odd.") != greedy
    assert generate("data.system_prompt=Be odd.") == generate("--system-prompt", "Be odd.")


def test_another_prompt_column_and_verls_spelling(lively, generate, tmp_path, capsys, monkeypatch):
    data = tmp_path / "mine.jsonl"
    data.write_text("".join(json.dumps({"q": f"{i} + 1 = ?"}) + "\n" for i in range(3)))
    out = str(tmp_path / "verl.parquet")
    args = [f"model.path={lively}", f"data.path={data}", "data.prompt_key=q", "data.n_samples=2"]
    args += [f"data.output_path={out}", "rollout.response_length=4", "rollout.top_k=50", "data.batch_size=2"]
    monkeypatch.setattr(sys, "argv", ["main_generation", *args])
    assert main_generation.cli(main_generation.main) == 0
    assert "data.batch_size has no effect" in capsys.readouterr().err
    rows = load_rows(out).rows
    assert [len(row["responses"]) for row in rows] == [2, 2, 2] and rows[0]["response_tokens"] == [4, 4]
    for wrong, message in (("model.pat=x", "Did you mean model.path?"), ("trainer.nnodes=2", "set it to 1")):
        monkeypatch.setattr(sys, "argv", ["main_generation", *args, wrong])
        assert main_generation.cli(main_generation.main) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_several_workers_write_the_file_of_one_and_go_on_with_what_is_finished(
    lively, sums, tmp_path, capfd, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    args = [f"model.path={lively}", f"data.path={sums['test']}", "data.n_samples=2", "rollout.response_length=4"]
    args += ["trainer.device=cpu", "rollout.temperature=2"]
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    assert main_generation.main([*args, f"data.output_path={one}"]) == 0
    # The second worker's share is there already: it was finished before the command was killed.
    share = [*main_generation.translate([*args, f"data.output_path={two}"]), "--share", "1/2"]
    assert cli.main(["generate", *share]) == 0 and not two.exists()
    capfd.readouterr()
    assert main_generation.main([*args, f"data.output_path={two}", "trainer.n_gpus_per_node=2"]) == 0
    said = capfd.readouterr()
    assert two.read_bytes() == one.read_bytes() and "12 prompts with 2 responses each" in said.out
    assert "6 of 6 prompts were finished before" in said.err and "12 responses, " in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.jsonl", "two.jsonl"], "no parts are left"


@pytest.mark.slow
def test_a_worker_that_fails_ends_the_command_with_its_words(lively, sums, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    command = ["generate", str(lively), "--data", str(sums["test"]), "--device", "cpu", "--max-tokens", "4"]
    out = tmp_path / "out.jsonl"
    broken = tmp_path / "out.jsonl.worker_1_of_2.parts"
    broken.write_text("a file where a folder must be")
    with pytest.raises(UserError, match=r"worker 1 of 2 ended with status 2; what it said stands above"):
        generate_command.main([*command[1:], "--out", str(out), "--workers", "2"])
    assert "cannot be made" in capfd.readouterr().err and not out.exists()
    with pytest.raises(SystemExit):
        generate_command.main([str(lively), "--prompt", "x", "--workers", "2"])


WRONG = {
    "two models": (["{model}", "{model}"], "takes one model"),
    "no such model": (["./nowhere"], "no such folder"),
    "a run's folder": (["{run}"], "is the folder of a run"),
    "greedy and several": (["{model}", "--n", "2", "--temperature", "0"], "are all the same"),
    "n": (["{model}", "--n", "0"], "at least one response"),
    "range": (["{model}", "--top-p", "2"], "flag --top-p"),
    "engine": (["{model}", "--engine", "vlm"], "rollout.name"),
    "idle key": (["{model}", "actor_rollout_ref.actor.optim.lr=1"], "has no effect here"),
    "flag for key": (["{model}", "actor_rollout_ref.rollout.n=2"], "use --n instead"),
    "suffix": (["{model}", "--out", "{folder}/x.csv"], ".parquet or .jsonl"),
    "exists": (["{model}", "--out", "{data}"], "suffix"),
    "mixed types": (["{model}", "--data", "{mixed}"], "mixes types"),
    "taken column": (["{model}", "--data", "{taken}"], "has a column `responses` already"),
    "no file": (["{model}", "--data", "{folder}/none.json"], "--data: There is no file"),
    "no room": (["{model}", "--max-tokens", "600"], "leaves no room for a prompt"),
    "overlong": (["{model}", "data.max_prompt_length=2"], "none is left"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_answered_before_weights_are_loaded(case, tiny_model, sums, tmp_path, monkeypatch, capsys):
    def never(*args, **named):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(models, "load_causal_lm", never)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("{}")
    (tmp_path / "mixed.json").write_text('[{"prompt": "a", "x": 1}, {"prompt": "b", "x": "one"}]')
    (tmp_path / "taken.json").write_text('[{"prompt": "a", "responses": ["b"]}]')
    places = {"model": tiny_model, "run": tmp_path / "run", "folder": tmp_path, "data": sums["test"]}
    places |= {"mixed": tmp_path / "mixed.json", "taken": tmp_path / "taken.json"}
    given, message = WRONG[case]
    args = [word.format(**places) for word in given]
    args = ["generate", "--data", str(sums["test"]), "--out", str(tmp_path / "x.parquet"), *args]
    assert cli.main(args) == 2
    assert message in capsys.readouterr().err


def test_an_existing_result_is_not_replaced_unless_asked(generate, lively, sums, tmp_path, capsys):
    generate()
    args = ["generate", str(lively), "--data", str(sums["test"]), "--out", str(tmp_path / "out.jsonl")]
    assert cli.main(args) == 2
    assert "--overwrite" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 4], ids=["all weights", "adapters"])
def test_a_checkpoint_gives_the_weights_and_settings_of_its_run(rank, tiny_model, sums, tmp_path, capsys):
    more = {"actor_rollout_ref__actor__optim__lr": 0.1, "trainer__export_hf": "last", "data__system_prompt": "Be odd."}
    run(tiny_model, sums, tmp_path, actor_rollout_ref__model__lora_rank=rank, trainer__export_lora="merged", **more)
    checkpoint = tmp_path / "test" / "run" / "checkpoints" / "global_step_2"
    capsys.readouterr()
    texts = []
    for name, extra in (
        (checkpoint, []),
        (checkpoint / "huggingface", ["--system-prompt", "Be odd."]),
        (tiny_model, []),
    ):
        args = ["generate", str(name), "--prompt", "3 + 4 = ?", *extra]
        assert cli.main([*args, *([] if name == checkpoint else ["--max-tokens", "6"])]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]

    settings = checkpoint_settings(checkpoint)
    exported = models.load_module(models.find_model(str(checkpoint), settings, print), torch.device("cpu"))
    bare = models.ModelSource("x", settings.config.actor_rollout_ref.model, checkpoint=checkpoint)
    laid_over = models.load_module(bare, torch.device("cpu"))
    start = models.load_module(models.ModelSource("x", bare.config), torch.device("cpu"))
    ours, theirs, before = (dict(module.named_parameters()) for module in (laid_over, exported, start))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)
    assert any(not torch.allclose(ours[name], before[name], atol=1e-3) for name in ours)


def checkpoint_settings(checkpoint: Path) -> Settings:
    import argparse

    return read_settings(argparse.Namespace(n=None, temperature=None), [], settings_folder(str(checkpoint)))


def test_a_damaged_checkpoint_is_refused_and_one_without_a_model_is_read_from_its_tensors(
    tiny_model, sums, tmp_path, capsys
):
    run(tiny_model, sums, tmp_path)
    checkpoint = tmp_path / "test" / "run" / "checkpoints" / "global_step_2"
    args = ["generate", str(checkpoint), "--prompt", "3 + 4 = ?"]
    assert cli.main(args) == 0
    moved = tmp_path / "moved" / "a" / "global_step_2"
    shutil.copytree(checkpoint, moved)
    assert cli.main(["generate", str(moved), "--prompt", "3 + 4 = ?"]) == 2
    assert "without its run's config.yaml" in capsys.readouterr().err
    broken = checkpoint.with_name("global_step_9")
    shutil.copytree(checkpoint, broken)
    (broken / "state.json").write_text("{}")
    assert cli.main(["generate", str(broken), "--prompt", "3 + 4 = ?"]) == 2
    assert "is damaged and is not loaded" in capsys.readouterr().err
