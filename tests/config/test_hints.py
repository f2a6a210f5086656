"""Hints name what was meant, or nothing; all mistakes of a command are told at once, whatever kind they are."""

from __future__ import annotations

import re

import pytest

from posttrain import launch
from posttrain.config import ConfigError, load_config
from posttrain.config.root import PPOConfig
from posttrain.config.schema import leaves
from posttrain.config.trees import SFT
from posttrain.other_systems.names import COUNTERPARTS
from posttrain.spelling import closest, slips

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"


@pytest.mark.parametrize(
    ("word", "name", "count"),
    [
        ("seed", "seed", 0),
        ("sed", "seed", 1),
        ("paht", "path", 1),
        ("lora", "lr", 2),
        ("micro", "mini", 3),
        ("", "ab", 2),
    ],
)
def test_slips_of_the_keyboard_are_counted(word, name, count):
    assert slips(word, name) == slips(name, word) == count


@pytest.mark.parametrize(
    ("word", "known", "found"),
    [
        ("gropo", ("grpo", "rloo"), "grpo"),
        ("gea", ("gae", "gpg"), "gae"),
        ("ppo", ("opo", "gpg", "gae"), None),
        ("lora", ("lr", "model"), None),
        ("temprature", ("temperature", "top_p"), "temperature"),
        ("ppo_micro_batch_size", ("ppo_mini_batch_size",), None),
    ],
)
def test_a_name_is_meant_only_where_it_is_a_slip_away(word, known, found):
    assert closest(word, known) == found


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        (f"{ROLLOUT}.lora_adapter_path", f"did you mean `{MODEL}.lora_adapter_path`?"),
        ("data.train_batch_siz", "did you mean `data.train_batch_size`?"),
        (f"{ACTOR}.use_dynamic_bzs", f"did you mean `{ACTOR}.use_dynamic_bsz`?"),
        (f"{ROLLOUT}.enforce_eagre", f"did you mean `{ROLLOUT}.enforce_eager` (that is `"),
        ("adv_estimator", "did you mean `algorithm.adv_estimator`?"),
        ("optim.lr", "did you mean `actor_rollout_ref.actor.optim.lr` or `critic.optim.lr`?"),
        ("actor_rolout_ref.rollout.n", f"did you mean `{ROLLOUT}.n`?"),
        ("trainer.total_epoch", "did you mean `trainer.total_epochs`?"),
    ],
)
def test_an_unknown_key_is_answered_with_the_one_that_was_meant(problems, key, hint):
    assert hint in problems("algorithm=grpo", f"{key}=1")


@pytest.mark.parametrize("key", [f"{ROLLOUT}.server_args", "data.foo", "trainer.wobble", "some.path", f"{ACTOR}.x"])
def test_a_key_that_is_like_no_other_gets_the_list_instead_of_a_guess(problems, key):
    said = problems("algorithm=grpo", f"{key}=1")
    assert f"Unknown key `{key}`" in said and "did you mean" not in said


@pytest.mark.parametrize("key", ["critic.use_kl_loss", "reward_model.ppo_epochs", f"{ACTOR}.input_tokenizer"])
def test_another_roles_setting_is_not_offered(problems, key):
    said = problems("algorithm=grpo", f"{key}=1")
    assert f"Unknown key `{key}`" in said and "did you mean" not in said


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("algorithm.adv_estimator=ppo", "did you mean `gae`?"),
        ("algorithm.adv_estimator=dapo", "write `algorithm=dapo`"),
        (f"{ACTOR}.policy_loss.loss_mode=ppo", "did you mean `vanilla`?"),
    ],
)
def test_names_that_others_use_are_answered_with_ours(problems, setting, hint):
    assert hint in problems(setting)


def test_a_name_of_trl_or_openrlhf_is_answered_with_ours_and_every_answer_names_a_setting(problems):
    said = problems("num_generations=4", "max_completion_length=64", "n_samples_per_prompt=2")
    assert f"TRL's `num_generations` is here: `{ROLLOUT}.n`" in said and "`data.max_response_length`" in said
    assert f"OpenRLHF's `n_samples_per_prompt` is here: `{ROLLOUT}.n`" in said
    for name, (_, here) in COUNTERPARTS.items():
        for key in re.findall(r"[a-z_]+(?:\.[a-z_]+)+(?==|[` ])", here):
            assert key in leaves(PPOConfig), (name, key)
        assert "`" in here or "not needed" in here, name
    assert "`actor_rollout_ref.rollout.n`; such settings" in flags("--num-generations", "4")
    assert "did you mean `--lr`?" in flags("--learning_rate", "1e-5")


def test_a_file_of_settings_and_spaces_around_the_equals_sign_are_answered_with_how_they_are_written(problems):
    assert "--config-path=conf --config-name=mine" in problems("conf/mine.yaml", "trainer.seed=1")
    for words in (["trainer.seed", "=", "3"], ["trainer.seed", "=3"]):
        said = problems("algorithm=grpo", *words)
        assert "1 problem in" in said and "without spaces around `=`" in said
    assert "words of a comment" in problems("algorithm=grpo", "a", "comment")


def test_supervised_training_answers_the_customary_names_with_their_section():
    with pytest.raises(ConfigError) as caught:
        load_config(["learning_rate=1", "per_device_train_batch_size=2", "num_generations=4"], tree=SFT)
    said = str(caught.value)
    assert "did you mean `training.learning_rate` (that is `optim.lr`)?" in said
    assert "did you mean `training.per_device_train_batch_size`?" in said
    assert "is here" not in said  # that name belongs to RL


def flags(*args: str) -> str:
    with pytest.raises(ConfigError) as caught:
        launch.resolve(launch.parse(args), {})
    return str(caught.value)


def test_a_flag_is_answered_with_what_was_meant_or_with_nothing():
    assert "`actor_rollout_ref.model.lora_rank=8`" in flags("--lora", "8") and "--lr`" not in flags("--lora", "8")
    assert "did you mean `--epochs`?" in flags("--epoch", "3")
    assert "did you mean" not in flags("--gpus", "3")


WRONG = {
    "a preset": (["preset=embeded"], "did you mean `embedded`?"),
    "a group": (["algorithm=gropo"], "the group `algorithm` has no `gropo`"),
    "a main file": (["--config-name=nowhere"], "There is no `nowhere.yaml`"),
    "a folder": (["--config-path=nowhere"], "The folder `nowhere`"),
    "an option": (["--lr", "1e-4"], "Unknown option `--lr`"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_all_mistakes_are_told_together_also_beside(problems, kind):
    args, part = WRONG[kind]
    said = problems(*args, "trainer.sed=1", f"{ROLLOUT}.n=many", f"{ROLLOUT}.temperature=-1", "data.train_batch_size=4")
    assert part in said and "4 problems" in said
    assert "trainer.seed" in said and "`actor_rollout_ref.rollout.n`: expected an integer" in said
    assert "temperature" in said and "not settings" not in said


def test_all_mistakes_are_told_together_also_beside_a_wrong_flag_and_a_broken_file(write):
    said = flags("--lerning_rate", "1", "trainer.sed=1", "preset=embeded", "--rollout_n", "many")
    assert "4 problems" in said
    assert all(part in said for part in ("--lerning_rate", "trainer.seed", "`embedded`", "flag --rollout_n"))
    write("broken.yaml", "trainer: [a,\n")
    said = flags("--config-path=.", "--config-name=broken", "trainer.sed=1")
    assert "do not compose" in said and "trainer.seed" in said


def test_what_a_missing_preset_would_have_set_is_not_held_against_the_user(problems):
    """`algorithm=dapo` sets groups of 16; without it the filter would be refused for single responses."""
    said = problems("algorithm=dapoo", "algorithm.filter_groups.enable=True")
    assert "1 problem in" in said and "did you mean `dapo`?" in said


def test_a_mistyped_model_is_answered_without_asking_the_hub(monkeypatch, tmp_path, write):
    from huggingface_hub import constants

    write("models/tiny/config.json", "{}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    args = ["algorithm=grpo", "data.train_files=embedded"]
    with pytest.raises(ConfigError) as caught:
        load_config([*args, f"{MODEL}.path=models/tny"], environment=True)
    said = str(caught.value)
    assert "models/tny is neither a folder here nor a model in the hub's cache" in said
    assert "HF_HUB_OFFLINE forbids" in said and f"did you mean `{tmp_path / 'models' / 'tiny'}`?" in said
    (tmp_path / "cache" / "models--org--tiny" / "snapshots" / "1").mkdir(parents=True)
    load_config([*args, f"{MODEL}.path=org/tiny"], environment=True)  # it is there


def test_a_hub_that_nobody_can_reach_is_named(monkeypatch, tmp_path):
    import socket

    from huggingface_hub import constants

    from posttrain.models import model_files

    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        for name in ("https_proxy", "http_proxy", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        model_files._answers.cache_clear()
        assert model_files.why_not_from_hub("org/tiny") is None
    model_files._answers.cache_clear()
    assert model_files.why_not_from_hub("org/tiny") == f"the hub {endpoint} cannot be reached"
    model_files._answers.cache_clear()
