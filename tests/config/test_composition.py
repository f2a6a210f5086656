"""The YAML tree, Hydra's composition of it, and users' own files and groups."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import posttrain
from posttrain.config import PPOConfig, compose
from posttrain.config.schema import leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GRPO_BLOCK = """
algorithm:
  adv_estimator: grpo
actor_rollout_ref:
  rollout:
    n: 5
  actor:
    ppo_mini_batch_size: 256
    use_kl_loss: True
    kl_loss_coef: 0.001
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private copy of the package's tree that takes its place."""
    copy = tmp_path / "tree"
    shutil.copytree(compose.PACKAGE_TREE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(compose, "PACKAGE_TREE", copy)
    return copy


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


def test_the_resolved_tree_is_yaml_of_all_sections(load):
    resolved = load("--cfg", "job", "algorithm.adv_estimator=grpo")
    assert resolved.show == "job"
    tree = yaml.safe_load(resolved.to_yaml())
    assert tree["algorithm"]["adv_estimator"] == "grpo"
    assert set(tree) == set(PPOConfig())


def test_the_main_file_in_the_package_gives_the_defaults(load):
    assert (Path(posttrain.__file__).parent / "trainer" / "config" / "ppo_trainer.yaml").is_file()
    resolved = load("trainer.seed=2")
    assert resolved.main_file == "posttrain/trainer/config/ppo_trainer.yaml"
    assert resolved.main_file in resolved.describe().splitlines()[0]


CHANGES = {
    "S0-04": ("actor/dp_actor.yaml", "strategy", "fsdp", "fsdp2", ACTOR),
    "S0-05": ("actor/actor.yaml", "clip_ratio", 0.2, 0.3, ACTOR),
    "S0-06": ("data/legacy_data.yaml", "max_prompt_length", 512, 77, "data"),
    "S0-07": ("rollout/rollout.yaml", "repetition_penalty", 1.0, 1.5, ROLLOUT),
    "S0-08": ("ref/dp_ref.yaml", "param_offload", "false", True, "actor_rollout_ref.ref.fsdp_config"),
    "S0-09": ("algorithm/rollout_correction.yaml", "rollout_is", "null", "token", "algorithm.rollout_correction"),
    "S0-64": ("ppo_trainer.yaml", "total_epochs", 15, 4, "trainer"),
}


@pytest.mark.parametrize("row", list(CHANGES))
def test_a_value_changed_in_a_file_of_the_tree_changes_the_resolved_tree(load, tree, row):
    file, name, old, value, section = CHANGES[row]
    key = f"{section}.{name}"
    change(tree / file, f"{name}: {old}\n", f"{name}: {value}\n")
    resolved = load("data.train_files=x.parquet")
    assert resolved.value(key) == value
    assert resolved.sources[key] == f"posttrain/trainer/config/{file}"


def test_dp_actor_wins_over_its_base(load, tree):
    change(tree / "actor/actor.yaml", "clip_ratio: 0.2", "clip_ratio: 0.3")
    change(tree / "actor/dp_actor.yaml", "strategy: fsdp\n", "strategy: fsdp\nclip_ratio: 0.4\n")
    assert load("data.train_files=x.parquet").value(f"{ACTOR}.clip_ratio") == 0.4


def test_four_overrides_with_source_command_line(load):
    given = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": "train.parquet",
        f"{ROLLOUT}.n": 5,
        f"{ACTOR}.ppo_mini_batch_size": 256,
    }
    resolved = load(*(f"{key}={value}" for key, value in given.items()))
    assert {key: resolved.value(key) for key in given} == given
    assert {resolved.sources[key] for key in given} == {"command line"}
    assert set(given) <= resolved.explicit


def test_a_copied_main_file_composes_to_the_same_tree(load, tmp_path):
    (tmp_path / "mine").mkdir()
    shutil.copy(compose.PACKAGE_TREE / "ppo_trainer.yaml", tmp_path / "mine" / "my_grpo_config.yaml")
    copied = load("--config-path=mine", "--config-name=my_grpo_config")
    original = load("--config-name=ppo_trainer")
    assert copied.values() == original.values()
    assert copied.explicit == set()
    assert copied.main_file == "mine/my_grpo_config.yaml"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param("algorithm.adv_estimator", "grpo", id="S0-17"),
        pytest.param(f"{ROLLOUT}.n", 5, id="S0-18"),
        pytest.param(f"{ACTOR}.ppo_mini_batch_size", 128, id="S0-19"),
        pytest.param(f"{ACTOR}.use_kl_loss", True, id="S0-20"),
        pytest.param(f"{ACTOR}.kl_loss_coef", 0.002, id="S0-21"),
    ],
)
def test_keys_of_an_edited_copy_have_the_file_as_source(load, tmp_path, key, value):
    copy = tmp_path / "my_grpo_config.yaml"
    shutil.copy(compose.PACKAGE_TREE / "ppo_trainer.yaml", copy)
    change(copy, "adv_estimator: gae", "adv_estimator: grpo")
    block = GRPO_BLOCK.replace("256", "128").replace("0.001", "0.002").split("actor_rollout_ref:")[1]
    copy.write_text(copy.read_text() + "\nactor_rollout_ref:" + block)
    resolved = load("--config-path=.", "--config-name=my_grpo_config")
    assert resolved.value(key) == value
    assert resolved.sources[key] == "my_grpo_config.yaml"
    assert key in resolved.explicit


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param("algorithm.adv_estimator", "grpo", id="S0-17"),
        pytest.param(f"{ROLLOUT}.n", 5, id="S0-18"),
        pytest.param(f"{ACTOR}.ppo_mini_batch_size", 256, id="S0-19"),
        pytest.param(f"{ACTOR}.use_kl_loss", True, id="S0-20"),
        pytest.param(f"{ACTOR}.kl_loss_coef", 0.001, id="S0-21"),
    ],
)
def test_keys_added_to_a_copy_are_the_users_also_where_they_equal_the_default(load, tmp_path, key, value):
    copy = tmp_path / "my_grpo_config.yaml"
    shutil.copy(compose.PACKAGE_TREE / "ppo_trainer.yaml", copy)
    change(copy, "adv_estimator: gae", "adv_estimator: grpo")
    copy.write_text(copy.read_text() + "\nactor_rollout_ref:" + GRPO_BLOCK.split("actor_rollout_ref:")[1])
    resolved = load("--config-path=.", "--config-name=my_grpo_config")
    assert resolved.value(key) == value
    assert resolved.sources[key] == "my_grpo_config.yaml" and key in resolved.explicit
    assert "trainer.total_epochs" not in resolved.explicit  # a line that was left as it was


def test_one_response_per_prompt_in_an_edited_copy_is_refused_under_grpo(problems, tmp_path):
    copy = tmp_path / "mine.yaml"
    shutil.copy(compose.PACKAGE_TREE / "ppo_trainer.yaml", copy)
    change(copy, "adv_estimator: gae", "adv_estimator: grpo")
    copy.write_text(copy.read_text() + "\nactor_rollout_ref: {rollout: {n: 1}}\n")
    assert f"`{ROLLOUT}.n=1` under `grpo`" in problems("--config-path=.", "--config-name=mine")


def test_a_main_file_of_ones_own_means_what_it_says(load, write):
    """A few keys over the built-in tree, by a defaults list: none is a line left over from a copy."""
    write("mine.yaml", "defaults: [ppo_trainer, _self_]\ntrainer: {total_epochs: 15}\nreward: {timeout_s: 10.0}\n")
    resolved = load("--config-path=.", "--config-name=mine", "algorithm.adv_estimator=grpo")
    assert {"trainer.total_epochs", "reward.timeout_s"} <= resolved.explicit
    assert resolved.sources["trainer.total_epochs"] == "mine.yaml"


def test_a_copied_group_file_gives_the_line_that_was_changed_alone(load, tmp_path):
    (tmp_path / "mine" / "rollout").mkdir(parents=True)
    copy = tmp_path / "mine" / "rollout" / "rollout.yaml"
    shutil.copy(compose.PACKAGE_TREE / "rollout" / "rollout.yaml", copy)
    change(copy, "\nn: 1\n", "\nn: 7\n")
    resolved = load("--config-path=mine", "trainer.seed=1")
    assert resolved.explicit == {f"{ROLLOUT}.n", "trainer.seed"}


def test_a_file_laid_over_the_built_in_tree_is_named(load, write):
    write("my_grpo_config.yaml", GRPO_BLOCK)
    resolved = load("--config-path=.", "--config-name=my_grpo_config")
    assert resolved.main_file == "my_grpo_config.yaml over posttrain/trainer/config/ppo_trainer.yaml"


def test_a_file_of_the_users_that_was_edited_is_read_again(load, write):
    write("mine.yaml", "trainer: {seed: 7}\n")
    assert load("--config-path=.", "--config-name=mine").value("trainer.seed") == 7
    write("mine.yaml", "trainer: {seed: 11}\n")
    assert load("--config-path=.", "--config-name=mine").value("trainer.seed") == 11


def test_a_file_without_defaults_is_laid_over_the_built_in_tree(load, problems, write):
    write("my_grpo_config.yaml", GRPO_BLOCK)
    resolved = load("--config-path=.", "--config-name=my_grpo_config", "data.train_files=a.parquet")
    assert resolved.value(f"{ROLLOUT}.n") == 5
    changed = {"algorithm.adv_estimator", f"{ROLLOUT}.n", f"{ACTOR}.use_kl_loss", "data.train_files"}
    changed |= {"actor_rollout_ref.model.path"}
    default = {key: leaf.default for key, leaf in leaves(PPOConfig).items()}
    assert {key for key, value in resolved.values().items() if value != default[key]} == changed
    write("wrong.yaml", "algorithm: {adv_estimatr: grpo}")
    assert "`algorithm.adv_estimator`" in problems("--config-path=.", "--config-name=wrong")


@pytest.mark.parametrize("absolute", [True, False])
def test_a_folder_is_found_from_the_working_folder(load, write, tmp_path, absolute):
    write("conf/my_grpo_config.yaml", GRPO_BLOCK)
    folder = str(tmp_path / "conf") if absolute else "conf"
    resolved = load(f"--config-path={folder}", "--config-name=my_grpo_config")
    assert resolved.sources["algorithm.adv_estimator"] == "conf/my_grpo_config.yaml"


def test_a_folder_beside_the_module_is_found_second(load, problems):
    assert load("--config-path", "config", "--config-name", "ppo_trainer").value("trainer.total_epochs") == 15
    text = problems("--config-path=nowhere", "trainer.seed=1")
    assert "nowhere" in text and str(Path.cwd()) in text


def test_a_new_group_enters_the_tree_and_is_swapped(load, tree, write):
    change(tree / "ppo_trainer.yaml", "  - _self_\n", "  - mygroup: a\n  - _self_\n")
    write("tree/mygroup/a.yaml", "rate: 0.25\n")
    write("tree/mygroup/b.yaml", "rate: 0.5\n")
    key = f"{ACTOR}.clip_ratio"
    assert load(f"{key}=${{mygroup.rate}}").value(key) == 0.25
    swapped = load("mygroup=b", f"{key}=${{mygroup.rate}}")
    assert swapped.value(key) == 0.5
    assert yaml.safe_load(swapped.to_yaml())["mygroup"] == {"rate": 0.5}


def test_a_group_of_settings_needs_the_global_package(load, problems, write):
    write("conf/main.yaml", "defaults: [ppo_trainer, {mygroup: a}, _self_]\n")
    write("conf/mygroup/a.yaml", "# @package _global_\ntrainer: {seed: 7}\n")
    resolved = load("-cp", "conf", "-cn", "main")
    assert (resolved.value("trainer.seed"), resolved.sources["trainer.seed"]) == (7, "conf/mygroup/a.yaml")
    write("conf/mygroup/b.yaml", "trainer: {seed: 8}\n")
    assert "# @package _global_" in problems("-cp", "conf", "-cn", "main", "mygroup=b")


def test_the_command_line_wins_over_the_file(load, write):
    write("conf/my_grpo_config.yaml", GRPO_BLOCK + "data: {train_files: file.parquet}\n")
    resolved = load("--config-path=conf", "--config-name=my_grpo_config", "data.train_files=line.parquet")
    assert resolved.value("data.train_files") == "line.parquet"
    assert resolved.sources["data.train_files"] == "command line"
    assert resolved.sources[f"{ROLLOUT}.n"] == "conf/my_grpo_config.yaml"


def test_the_algorithm_class_has_the_defaults_of_the_yaml(load):
    from posttrain.trainer.config.algorithm import AlgorithmConfig

    assert load("trainer.seed=2").config.algorithm == AlgorithmConfig()


def test_every_key_is_described_with_one_sentence(load):
    text = load("trainer.seed=2").describe()
    for key, leaf in leaves(PPOConfig).items():
        assert f"{key}: " in text
        assert leaf.sentence.endswith("."), key


def test_the_generated_files_are_up_to_date():
    from made_settings import files

    assert [path for path, text in files().items() if path.read_text("utf-8") != text] == []


def test_the_tree_alone_equals_the_dataclasses(load):
    resolved = load("--config-name=ppo_trainer", provided=["data.train_files", "actor_rollout_ref.model.path"])
    assert resolved.values() == {key: leaf.default for key, leaf in leaves(PPOConfig).items()}
    assert set(resolved.sources.values()) == {"default"}


def test_presets_are_laid_over_the_tree_and_under_the_user(load):
    resolved = load("preset=embedded", "trainer.total_training_steps=3")
    assert resolved.value("data.train_batch_size") == 200
    assert resolved.sources["data.train_batch_size"] == "preset embedded"
    assert resolved.value("trainer.total_training_steps") == 3
    assert resolved.explicit == {"trainer.total_training_steps"}


def test_loading_makes_no_folder_and_imports_no_torch(tmp_path):
    code = (
        "import sys; from posttrain.config import load_config;"
        "r = load_config(['algorithm.adv_estimator=grpo', 'preset=embedded'], environment=True); r.describe();"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert os.listdir(tmp_path) == []
