"""Guides that name files, settings and commands: what they name is there, and they name all that they should."""

from __future__ import annotations

import inspect
import json
import re
import shutil
from pathlib import Path

import pytest

from posttrain import cli
from posttrain.bench.algorithms import all_algorithms, between
from posttrain.bench.algorithms import main as bench_algorithms
from posttrain.bench.command import parser as bench_parser
from posttrain.config.root import PPOConfig
from posttrain.config.schema import leaves
from posttrain.explain import METRICS, declared_metrics
from posttrain.launch import BY_FLAG
from posttrain.models.decodable import _FIXED_ROTATIONS, KNOWN
from posttrain.models.feed_forward import MIXTURES
from posttrain.planning.rl import RLPlanner
from posttrain.tracking import diagnosis

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SHORT = {"A.": "actor_rollout_ref.actor.", "R.": "actor_rollout_ref.rollout.", "M.": "actor_rollout_ref.model."}
DOTTED = re.compile(r"(?<![\w.])[A-Za-z_]+(?:\.[a-z_]+)+")


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def quoted(text: str) -> list[str]:
    """What stands between backticks on one line."""
    return re.findall(r"`([^`\n]+)`", text)


def settings_in(words: list[str]) -> set[str]:
    """Settings among dotted words: whole keys, their short forms, and endings that mean one key."""
    found = set()
    for word in [dotted for text in words for dotted in DOTTED.findall(text)]:
        word = SHORT[word[:2]] + word[2:] if word[:2] in SHORT else word
        found |= {key for key in leaves(PPOConfig) if key == word or key.endswith("." + word)}
    return found


def test_the_architecture_page_names_the_files_of_the_loop_and_they_exist():
    section = page("architecture.md").partition("The files of the loop")[2].partition("\n## ")[0]
    files = [word for line in section.splitlines() if line.startswith("| `") for word in quoted(line.split("|")[1])]
    assert len(files) >= 14 and [file for file in files if not (ROOT / "posttrain" / file).exists()] == []
    assert "trainer/ppo/ray_trainer.py" in files and "workers/actor/dp_actor.py" in files
    from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage

    assert callable(RayPPOTrainer.fit) and callable(compute_advantage)


def test_the_tuning_page_has_the_settings_of_plan_and_diagnosis_and_no_others():
    strings = re.findall(r'"[^"]*"', inspect.getsource(diagnosis))
    named = set(RLPlanner.lower) | settings_in(strings)
    assert {"actor_rollout_ref.actor.optim.lr", "tracking.samples_freq", "actor_rollout_ref.rollout.n"} <= named
    assert settings_in(quoted(page("tuning.md"))) == named


def test_the_page_on_models_names_what_the_fused_decoder_takes():
    text = page("add_model.md")
    row = next(line for line in text.splitlines() if line.startswith("| fused decoder"))
    assert {*KNOWN, *MIXTURES, *_FIXED_ROTATIONS} <= set(quoted(row))
    for path in re.findall(r"`((?:posttrain|tests)/[\w/.]+\.py)`", text):
        assert (ROOT / path).is_file(), path


QUESTIONS = {  # of the documents, by number and place
    "0 §5.1": "How do I know that it is GRPO?",
    "0 §5.2": "How do I look into a run?",
    "0 §5.3, n": "How many responses per prompt?",
    "0 §5.3, norm": "Does `norm_adv_by_std_in_grpo=False` make it faster?",
    "0 §5.3, mini": "What does `ppo_mini_batch_size` change?",
    "1, 1": "It runs out of memory",
    "1, 2": "Training is unstable",
    "1, 3": "High scores, bad answers",
    "1, 4": "Rollout is too slow",
    "3, n": "How many responses per prompt?",
    "3, unstable": "Training is unstable",
    "3, rewards": "All rewards are 0, or all are equal",
    "3, length": "Longer answers get higher rewards",
}


@pytest.mark.parametrize("place", QUESTIONS)
def test_every_question_of_the_documents_has_an_answer(place):
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", page("troubleshooting.md"), re.M | re.S))
    assert len(sections[QUESTIONS[place]].strip()) > 40


def test_what_the_answers_name_is_there():
    text = page("troubleshooting.md")
    words = quoted(text)
    keys = [word for word in words if word.startswith(("actor_rollout_ref.", "reward.", "algorithm."))]
    assert [word for word in keys if not settings_in([word]) and word not in ("reward.functions",)] == []
    flags = {flag for word in words for flag in re.findall(r"--(\w+)", word)} - {"data", "from"}
    assert flags and flags <= set(BY_FLAG)
    verbs = {word.split()[1] for word in words if word.startswith("posttrain ") and "/" not in word}
    assert {"plan", "explain", "config", "reward", "data"} == verbs and verbs <= set(cli.VERBS)
    metrics = [word for word in words if word in METRICS | declared_metrics()]
    assert {"groups/no_signal", "policy_loss", "kl_loss", "reward_std", "actor/ppo_kl"} <= set(metrics)
    for path in re.findall(r"`(posttrain/[\w/.]+\.py)`", text):
        assert "compute_grpo_outcome_advantage" in (ROOT / path).read_text()


def test_the_device_is_chosen_in_one_place_and_the_docs_say_what_was_tried(monkeypatch):
    import torch

    from posttrain.workers.roles import pick_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # what a ROCm build answers too
    assert pick_device("auto").type == "cuda" and pick_device("cpu").type == "cpu"
    choosing = [
        path.name
        for path in (ROOT / "posttrain").rglob("*.py")
        if re.search(r'torch\.device\("cuda" if', path.read_text())
    ]
    assert choosing == ["roles.py"]
    section = page("troubleshooting.md").partition("## Which devices")[2].partition("\n## ")[0]
    assert all(word in section for word in ("NVIDIA H200", "ROCm", "Ascend", "CPU"))


def test_the_parts_of_a_reward_that_the_answers_show_can_be_set():
    from posttrain.config import load_config
    from posttrain.rewards.loading import resolve_reward

    given = re.findall(r"\+reward\.functions\.\S+", page("troubleshooting.md"))
    config = load_config(["data.train_files=x.json", *given]).config
    spec = resolve_reward(config.custom_reward_function, functions=config.reward.functions)
    assert (
        len(given) == 6 and spec.kind == "combined" and all(name in spec.label for name in ("right", "form", "short"))
    )


def test_the_baselines_are_those_of_the_stored_runs(tmp_path, capsys):
    """The page and the picture are what the command makes of docs/baselines.json, whose runs have seed and curve."""
    copy, picture = tmp_path / "baselines.md", tmp_path / "algorithms.svg"
    shutil.copy(DOCS / "baselines.md", copy)
    stored = str(DOCS / "baselines.json")
    args = ["algorithms", "--from", stored, "--markdown", str(copy), "--svg", str(picture)]
    assert bench_algorithms(bench_parser().parse_args(args)) == 0
    assert (
        copy.read_text() == page("baselines.md") and picture.read_text() == (DOCS / "images/algorithms.svg").read_text()
    )
    runs = json.loads(Path(stored).read_text())["runs"]
    assert all(run["curve"][0][0] == 0 and run["curve"][-1][0] == run["steps"] and run["seed"] for run in runs)
    table = between(page("baselines.md"))
    # A new algorithm has no runs yet.
    rows = [row for row in all_algorithms() if row.name in {run["algorithm"] for run in runs}]
    assert rows and all(re.search(rf"^\| {re.escape(row.name)} \| {row.kind} \|", table, re.M) for row in rows)
