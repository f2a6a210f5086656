"""The examples: headed by what they need, resolved as they are and in their small form; what is added wins."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

from posttrain.config import load_config
from posttrain.config.trees import PPO, SFT

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import check_examples  # noqa: E402

EXAMPLES = ROOT / "examples"
SHELL = [path for path in check_examples.examples() if path.suffix == ".sh"]
RUNNING = [path for path in SHELL if not check_examples.waits_for(path)]
FOLDERS = {  # S4-01, and the table of §12
    "agents": 1,
    "environments": 4,
    "ppo_trainer": 2,
    "grpo_trainer": 4,
    "remax_trainer": 1,
    "rloo_trainer": 1,
    "sft/gsm8k": 1,
    "sft/multiturn": 1,
    "sglang_multiturn": 1,
    "tools": 1,
    "tuning/0.5b": 1,
    "tuning/7b": 1,
    "tuning/32b": 1,
    "data_preprocess": 10,
}
SHOWS = """#!/usr/bin/env bash
case "$1" in
  -c | */requirements.py) ;;  # it is a Python that has everything
  -m) printf '%s\\n' "$@" ;;
  *) exec {python} "$@" ;;
esac
"""


ALWAYS_EMBEDDED = ("run_guess", "run_openenv", "run_verifiers")
WITH_A_PACKAGE = ("run_mcp", "run_reasoning_gym")
"""They ask an optional package for their rows: tests/tools/test_environment_examples.py has stand-ins for these."""


def name_of(script: Path) -> str:
    return script.relative_to(EXAMPLES).as_posix()


def started(script: Path, folder: Path, *more: str, smoke: bool) -> list[str]:
    """What the script starts at last."""
    return all_started(script, folder, *more, smoke=smoke)[-1]


def all_started(script: Path, folder: Path, *more: str, smoke: bool) -> list[list[str]]:
    """What the script starts: an interpreter that shows the arguments of `-m` stands for Python."""
    shim = folder / "python"
    shim.write_text(SHOWS.format(python=sys.executable))
    shim.chmod(0o755)
    own = {"PYTHON": str(shim), "HOME": "/home/somebody", "SMOKE": str(int(smoke)), "SMOKE_OUT": str(folder / "out")}
    done = subprocess.run(
        ["bash", str(script), *more], env={**os.environ, **own}, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    starts = [place for place, word in enumerate(words) if word == "-m"]
    return [words[begin:end] for begin, end in zip(starts, [*starts[1:], len(words)], strict=True)]


def test_the_folders_of_the_document_are_there():
    counts = {folder: sum(path.parent == EXAMPLES / folder for path in check_examples.examples()) for folder in FOLDERS}
    assert counts == FOLDERS and sum(counts.values()) == len(check_examples.examples())


@pytest.mark.parametrize("script", SHELL, ids=name_of)
def test_an_example_says_what_it_needs_and_what_to_expect(script):
    text = script.read_text()
    heading = text.partition("set -euo pipefail")[0]
    assert "#   needs    " in heading and os.access(script, os.X_OK)
    if check_examples.waits_for(script):
        assert "#   waits    " in heading
    else:
        assert "#   expect   " in heading and f"SMOKE=1 bash examples/{name_of(script)}" in heading
    command = text.partition("posttrain.trainer")[2]
    assert "#" not in command and command.endswith('  ${small[@]+"${small[@]}"} \\\n  "$@"\n')


@pytest.mark.parametrize("script", [one for one in RUNNING if one.stem not in WITH_A_PACKAGE], ids=name_of)
def test_an_example_resolves_as_it_is_and_small_and_what_is_added_wins(script, tmp_path):
    check_what_it_resolves_to(script, tmp_path)


def check_what_it_resolves_to(script: Path, tmp_path: Path) -> None:
    tree = SFT if script.parent.parent.name == "sft" else PPO
    for smoke in (False, True):
        added = "trainer.experiment_name=added_behind"
        _, module, *settings = started(script, tmp_path, added, smoke=smoke)
        assert module.startswith("posttrain.trainer.")
        resolved = load_config([*settings], tree=tree)
        assert resolved.value("trainer.experiment_name") == "added_behind"
        model = "model.path" if tree is SFT else "actor_rollout_ref.model.path"
        small = resolved.value(model)
        own = small == "embedded" or small.startswith(f"{tmp_path}/out/")
        assert own == (smoke or script.stem in ALWAYS_EMBEDDED), "itself, taught by SFT, or made by the script"
        assert (resolved.value("trainer.total_training_steps") == 2) == smoke


@pytest.mark.parametrize("script", [path for path in SHELL if path not in RUNNING], ids=name_of)
def test_an_example_that_waits_says_so_in_one_sentence_with_a_status_of_its_own(script, tmp_path):
    done = subprocess.run(["bash", str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == check_examples.WAITS == 69
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1 and "not built" in done.stderr


@pytest.mark.slow
def test_the_small_form_of_the_large_model_trains_by_megatron(tmp_path):
    script = EXAMPLES / "grpo_trainer" / "run_deepseek671b_math_megatron_80gb.sh"
    status, _, said = check_examples.run(script, tmp_path)
    assert status == 0, said[-2000:]
    ranks = r"\(tensor 2, pipeline 1, expert 2, sequence parallel\)"
    assert re.search(rf"^Train engine: megatron-core [\d.]+ {ranks}$", said, re.M)
    config = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
    assert config["model_type"] == "deepseek_v3" and "rollout.name=native generates" in said
    metrics = (tmp_path / "out" / "verl_megatron_math" / "deepseek_v3" / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["actor/grad_norm"] > 0 for line in metrics[1:]) and len(metrics) == 3


DOCUMENT_4 = {  # §2.1
    "algorithm.adv_estimator": "grpo",
    "data.train_files": "/home/somebody/data/gsm8k/train.parquet",
    "data.val_files": "/home/somebody/data/gsm8k/test.parquet",
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 1024,
    "actor_rollout_ref.model.path": "Qwen/Qwen2-7B-Instruct",
    "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 40,
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "actor_rollout_ref.actor.entropy_coeff": 0.0,
    "actor_rollout_ref.actor.fsdp_config.param_offload": False,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": False,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.6,
    "actor_rollout_ref.rollout.n": 5,
    "actor_rollout_ref.ref.fsdp_config.param_offload": True,
    "trainer.logger": ["console", "wandb"],
    "trainer.project_name": "verl_grpo_example",
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "trainer.save_freq": 20,
    "trainer.total_epochs": 15,
}
QWEN2_7B = EXAMPLES / "grpo_trainer" / "run_qwen2-7b.sh"


def test_the_script_has_the_28_settings_of_the_document(tmp_path):
    _, _, *settings = started(QWEN2_7B, tmp_path, smoke=False)
    resolved = load_config(settings)
    assert {key: resolved.value(key) for key in DOCUMENT_4} == DOCUMENT_4 and len(DOCUMENT_4) == 28
    assert {setting.partition("=")[0] for setting in settings} == {*DOCUMENT_4, "trainer.experiment_name"}


def said_by(script: Path, folder: Path, *more: str, smoke: bool = False) -> str:
    """What the script says before it starts Python."""
    shim = folder / "python"
    shim.write_text(SHOWS.format(python=sys.executable))
    shim.chmod(0o755)
    own = {"PYTHON": str(shim), "HOME": "/home/somebody", "SMOKE": str(int(smoke)), "SMOKE_OUT": str(folder / "out")}
    done = subprocess.run(
        ["bash", str(script), *more], env={**os.environ, **own}, cwd=folder, capture_output=True, text=True
    )
    return done.stdout.partition("\n-m\n")[0]


def test_the_small_form_says_which_engine_stands_for_the_printed_one(tmp_path):
    """What guides print is what the scripts set: another engine is the small form's, and not in silence."""
    printed = {QWEN2_7B: "vllm", EXAMPLES / "grpo_trainer" / "run_qwen3-8b.sh": "vllm", SEARCH: "sglang"}
    for script, engine in printed.items():
        for smoke, wanted in ((False, engine), (True, "native")):
            settings = started(script, tmp_path, smoke=smoke)[2:]
            assert load_config(settings).value("actor_rollout_ref.rollout.name") == wanted
        told = said_by(script, tmp_path, smoke=True)
        assert "SMOKE=1: rollout.name=native generates, also where the script names vllm or sglang\n" in told + "\n"


@pytest.mark.slow
def test_the_table_says_what_a_small_run_stands_for(tmp_path):
    script = EXAMPLES / "grpo_trainer" / "run_deepseek671b_math_megatron_80gb.sh"
    sentence = check_examples.stands_for(script)
    assert "tiny DeepSeek-V3" in sentence
    assert f"SMOKE=1: {sentence}" in said_by(script, tmp_path, smoke=True)
    assert sentence not in said_by(script, tmp_path)
    assert check_examples.judged(script, 0, "") == (True, f"two steps: {sentence}")
    page = (ROOT / "docs" / "examples.md").read_text()
    assert sentence in page and "| yes |" not in page


SMALL_RUNS = {
    "grpo": QWEN2_7B,
    "remax": EXAMPLES / "remax_trainer" / "run_qwen2.5-3b.sh",
    "rloo": EXAMPLES / "rloo_trainer" / "run_qwen2-7b.sh",
}


@pytest.mark.parametrize("name", SMALL_RUNS)
def test_the_small_form_trains(name, tiny_model, tmp_path, monkeypatch, capfd):
    """What the script starts under SMOKE=1, in this process, with a tiny model (scripts/check_examples.py: all)."""
    from posttrain.trainer import main_ppo

    own = [f"actor_rollout_ref.model.path={tiny_model}", "data.max_response_length=4", "trainer.export_hf=none"]
    _, _, *settings = started(SMALL_RUNS[name], tmp_path, *own, smoke=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["main_ppo", *settings])
    assert main_ppo.cli() == 0
    said = capfd.readouterr().out
    assert (
        f"Using advantage estimator: {name}" in said
        and "critic" not in said.partition("Creating workers")[2].partition("\n")[0]
    )
    [metrics] = (tmp_path / "out").rglob("metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines][-2:] == [1, 2] and lines[-1]["actor/optimizer_steps"] == 2
    assert ("remax/baseline_mean" in lines[-1]) == (name == "remax")


SEARCH = EXAMPLES / "sglang_multiturn" / "run_qwen2-7b_search.sh"
DOCUMENT_4_TURNS = {  # §6.1
    "actor_rollout_ref.rollout.name": "sglang",
    "actor_rollout_ref.rollout.multi_turn": {
        "enable": True,
        "max_assistant_turns": 5,
        "tools": ["search"],
        "tool_config": {"search": {"api_key": "of-a-server"}},
    },
}


@pytest.mark.slow
def test_the_small_form_learns_to_call_the_tool_and_samples_have_calls_of_several_turns(tmp_path, monkeypatch, capfd):
    """SFT and RL as the script starts them under SMOKE=1, in this process, with a tiny model and a single question."""
    from posttrain import cli
    from posttrain.models.embedded import write_model
    from posttrain.trainer import main_ppo

    monkeypatch.setenv("SEARCH_API_KEY", "of-a-server")
    resolved = load_config(started(SEARCH, tmp_path, smoke=False)[2:])
    assert {key: resolved.value(key) for key in DOCUMENT_4_TURNS} == DOCUMENT_4_TURNS
    monkeypatch.delenv("SEARCH_API_KEY")
    own = ["data.train_max_samples=1", "data.train_batch_size=1", "data.val_max_samples=1", "trainer.export_hf=none"]
    teach, learn = all_started(SEARCH, tmp_path, *own, "data.val_files=null", smoke=True)
    monkeypatch.chdir(tmp_path)
    tiny = write_model(tmp_path / "tiny", hidden_size=64, intermediate_size=256)
    taught = [f"model.path={tiny}", *own[:2], "optim.lr=1e-2", "trainer.total_training_steps=50"]
    assert cli.main([*teach[2:], *taught]) == 0
    model = tmp_path / "out/sft/search/checkpoints/global_step_50/huggingface"
    more = [f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.actor.ppo_mini_batch_size=1"]
    monkeypatch.setattr(sys, "argv", ["main_ppo", *learn[2:], *more])
    assert main_ppo.cli() == 0
    assert "api_key is empty: search uses a local index over 40 passages" in capfd.readouterr().out
    samples = tmp_path / "out/verl_multiturn_example/qwen2_7b_search/samples/step_1.parquet"
    rows = pyarrow.parquet.read_table(samples).to_pylist()
    found = [call for row in rows if row["num_turns"] > 1 for call in json.loads(row["tool_calls"])]
    assert any("Port Ellery is the capital" in call["answer"] and call["error"] is None for call in found), rows


LOOKUP = EXAMPLES / "tools" / "run_lookup.sh"


@pytest.mark.slow
def test_the_run_with_a_tool_that_learns_pays_for_asking_and_reading_only_and_its_small_form_trains(
    tiny_model, tmp_path, monkeypatch
):
    """The tool's answer is in no prompt and differs between equal questions; who does not say it earns nothing. Then
    the two commands of the small form, with a tiny model."""
    import runpy

    from posttrain import cli
    from posttrain.trainer import main_ppo

    score = runpy.run_path(str(LOOKUP.with_name("where.py")))["compute_score"]
    call = '<tool_call>{"name": "where", "arguments": {"is": "hat"}}</tool_call><tool_response>den</tool_response>'
    said = ["unknown", "", call, f"{call}barn", f"{call}den"]
    assert [score("where", words, "den") for words in said] == [0, 0, 0, 0, 1]
    teach, learn = all_started(LOOKUP, tmp_path, smoke=True)
    rows = [json.loads(line) for line in (tmp_path / "out/tools/train.jsonl").read_text().splitlines()]
    assert len({row["ground_truth"] for row in rows if row["prompt"] == "hat"}) == 6
    assert not any(row["ground_truth"] in row["prompt"] for row in rows)
    monkeypatch.chdir(tmp_path)
    assert cli.main([*teach[2:], f"model.path={tiny_model}", "data.train_max_samples=16"]) == 0
    quick = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.export_hf=none"]
    monkeypatch.setattr(sys, "argv", ["main_ppo", *learn[2:], *quick, "data.max_response_length=16"])
    assert main_ppo.cli() == 0
    found = pyarrow.parquet.read_table(tmp_path / "out/tools/lookup/samples/step_2.parquet").to_pylist()
    assert len(found) == 16 and all('"name": "where"' in row["prompt"] for row in found)


GUESS = EXAMPLES / "agents" / "run_guess.sh"


def test_the_run_with_an_agent_pays_for_near_guesses_and_its_small_form_trains(tiny_model, tmp_path, monkeypatch):
    import asyncio
    import runpy

    from posttrain.trainer import main_ppo

    play, told = runpy.run_path(str(GUESS.with_name("guess.py")))["play"], []

    class Chat:
        def __init__(self, *said: str) -> None:
            self.said = list(said)

        async def say(self) -> str:
            return self.said.pop(0)

        def tell(self, text: str) -> None:
            told.append(text)

    said = [("7",), ("5", "7"), ("9", "8"), ("5", "x"), ("seven",)]
    found = [asyncio.run(play(Chat(*words), {"ground_truth": "7"})) for words in said]
    assert [one["score"] for one in found] == pytest.approx([1, 1, 8 / 9, 0, 0]) and told == [
        "higher",
        "lower",
        "higher",
    ]
    (learn,) = all_started(GUESS, tmp_path, smoke=True)
    quick = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.export_hf=none"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["main_ppo", *learn[2:], *quick, f"actor_rollout_ref.model.path={tiny_model}"])
    assert main_ppo.cli() == 0
    found = pyarrow.parquet.read_table(tmp_path / "out/agents/guess/samples/step_2.parquet").to_pylist()
    assert len(found) == 16 and not any(row["error"] for row in found)


TWO_STAGES = (LOOKUP, SEARCH, EXAMPLES / "ppo_trainer" / "run_qwen2-7b_rm.sh")


@pytest.mark.parametrize("script", TWO_STAGES, ids=name_of)
def test_a_mistyped_key_is_said_before_the_model_of_the_first_stage_is_trained(script, tmp_path):
    shim, calls = tmp_path / "python", tmp_path / "calls"
    shim.write_text(
        f'#!/usr/bin/env bash\ncase "$*" in -c* | */requirements.py*) ;; *"--cfg job"*) exec {sys.executable} "$@" ;;\n'
        f'*) echo "$*" >>{calls} ;; esac\n'
    )
    shim.chmod(0o755)
    own = {"PYTHON": str(shim), "PYTHONPATH": str(ROOT), "SMOKE": "1", "SMOKE_OUT": str(tmp_path / "out")}
    given = {"env": {**os.environ, **own}, "cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run(["bash", str(script), "trainer.total_trainin_steps=4"], **given)
    assert done.returncode == 2 and "did you mean `trainer.total_training_steps`?" in done.stderr
    assert not calls.exists(), calls.read_text()
    assert subprocess.run(["bash", str(script)], **given).returncode == 0
    first, second = [line for line in calls.read_text().splitlines() if line.startswith("-m")]
    assert "trainer.total_training_steps=" in first and second.startswith("-m posttrain.trainer.main_ppo ")


SHAPES = {  # hidden, layers, heads, key heads, feed-forward, tokens, tied
    "0.5b": (896, 24, 14, 2, 4864, 151936, True),
    "7b": (3584, 28, 28, 4, 18944, 152064, False),
    "32b": (5120, 64, 40, 8, 27648, 152064, False),
}
NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
NAMES += ("vocab_size", "tie_word_embeddings")


@pytest.mark.parametrize("size", SHAPES)
def test_a_tuning_script_fits_the_gpu_that_it_names_with_the_memory_that_it_says(size, tmp_path, capsys):
    """`posttrain plan` for the model's shape, which needs no weights."""
    from posttrain import cli

    [script] = (EXAMPLES / "tuning" / size).glob("*.sh")
    _, _, *settings = started(script, tmp_path, smoke=False)
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | dict(zip(NAMES, SHAPES[size], strict=True))))
    room = re.search(r"_(\d+)gb\.sh$", script.name)
    assert room is not None
    here = [
        f"actor_rollout_ref.model.path={tmp_path / 'model'}",
        "data.train_files=embedded",
        "data.val_files=embedded",
    ]
    assert cli.main(["plan", "--gpu_gb", room[1], *settings, *here]) == 0
    said = capsys.readouterr().out
    fits = re.search(r"It fits: the peak, in \w+, is ([\d.]+) GiB", said)
    told = re.search(r"GB: ([\d.]+) GiB", script.read_text())
    assert fits is not None and told is not None, said
    assert float(told[1]) == pytest.approx(float(fits[1]), rel=0.02)
