"""Values as users write them, dicts from Python, references, and notes about settings without effect."""

from __future__ import annotations

from contextlib import suppress

import pytest

from posttrain.config import load_config
from posttrain.config.checked import holds
from posttrain.config.schema import assign, leaves
from posttrain.config.trees import PROGRAMS
from posttrain.config.values import WrongValue, convert
from posttrain.settings import Idle

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
TEMPLATE = "data.apply_chat_template_kwargs"


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ('trainer.logger=["console","wandb"]', "trainer.logger", ["console", "wandb"]),
        ("trainer.logger=console,wandb", "trainer.logger", ["console", "wandb"]),
        ("trainer.logger=console", "trainer.logger", ["console"]),
        ("data.train_files=a.parquet,b.parquet", "data.train_files", ["a.parquet", "b.parquet"]),
        ("data.train_files=['a.parquet', b.parquet]", "data.train_files", ["a.parquet", "b.parquet"]),
        ("data.train_files='a,b.parquet'", "data.train_files", "a,b.parquet"),
        ("trainer.project_name='my run'", "trainer.project_name", "my run"),
        ("trainer.project_name=2024", "trainer.project_name", "2024"),
        ("trainer.project_name=${trainer.seed}_x", "trainer.project_name", "1_x"),
        ("trainer.project_name=${oc.env:WHO}", "trainer.project_name", "me"),
        ("trainer.project_name=${WHO}", "trainer.project_name", "me"),
        ("data.train_files=$WHO/a.parquet", "data.train_files", "me/a.parquet"),
        ("data.system_prompt=Solve $WHO, for $x$", "data.system_prompt", "Solve $WHO, for $x$"),
        ("data.train_batch_size=1e3", "data.train_batch_size", 1000),
        ("data.val_batch_size=null", "data.val_batch_size", None),
        ("trainer.export_hf=none", "trainer.export_hf", "none"),
        ("+trainer.seed=3", "trainer.seed", 3),
        ("++trainer.seed=3", "trainer.seed", 3),
        ("actor_rollout_ref.actor.optim.betas=[0.9,0.95]", "actor_rollout_ref.actor.optim.betas", [0.9, 0.95]),
        (f"{TEMPLATE}={{enable_thinking: false}}", TEMPLATE, {"enable_thinking": False}),
        (f"{TEMPLATE}.enable_thinking=false", TEMPLATE, {"enable_thinking": False}),
        ("actor_rollout_ref.rollout={n: 4}", f"{ROLLOUT}.n", 4),
    ],
)
def test_a_value_is_read_as_written(load, monkeypatch, argument, key, value):
    monkeypatch.setenv("WHO", "me")
    found = load(argument).value(key)
    assert found == value and type(found) is type(value)


def test_references_and_variables_in_files(load, write, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    write("a.yaml", "data: {train_files: $HOME/a.parquet}\ntrainer: {project_name: 'n${algorithm.group_size}'}\n")
    resolved = load("--config-path=.", "--config-name=a", "algorithm.group_size=7")
    assert resolved.value("data.train_files") == "/home/me/a.parquet"
    assert resolved.value("trainer.project_name") == "n7"


def test_an_empty_key_in_a_file_counts_as_not_given(load, write):
    write("a.yaml", "trainer:\n  seed:\ndata:\n")
    resolved = load("--config-path=.", "--config-name=a")
    assert resolved.value("trainer.seed") == 1
    assert any("trainer.seed" in note and "empty" in note for note in resolved.notes)


@pytest.mark.parametrize(
    "overrides",
    [
        {"algorithm": {"name": "grpo"}, "actor_rollout_ref": {"rollout": {"n": 4}}, "trainer.seed": 3},
        {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": "4", "trainer": {"seed": 3}},
    ],
)
def test_a_dict_from_python_nested_or_dotted(overrides):
    resolved = load_config(overrides)
    keys = ("algorithm.adv_estimator", f"{ROLLOUT}.n", "trainer.seed")
    assert [resolved.value(key) for key in keys] == ["grpo", 4, 3]
    assert resolved.explicit == set(keys) and resolved.sources["trainer.seed"] == "overrides"


def test_a_dict_chooses_groups_and_keeps_free_form_dicts():
    resolved = load_config(
        {"preset": "embedded", "custom_reward_function": {"path": "r.py", "reward_kwargs": {"a": 1}}}
    )
    assert resolved.sources["data.train_batch_size"] == "preset embedded"
    assert resolved.config.custom_reward_function.reward_kwargs == {"a": 1}


@pytest.mark.parametrize(
    ("args", "key"),
    [
        (["critic.optim.lr=1e-4"], "critic.optim.lr"),
        (["algorithm.lam=0.9"], "algorithm.lam"),
        ([f"{ACTOR}.kl_loss_coef=0.01"], f"{ACTOR}.kl_loss_coef"),
        (["algorithm.kl_ctrl.kl_coef=0.01"], "algorithm.kl_ctrl.kl_coef"),
        ([f"{MODEL}.lora_alpha=32"], f"{MODEL}.lora_alpha"),
        ([f"{ACTOR}.loss_scale_factor=10"], f"{ACTOR}.loss_scale_factor"),
        (["data.curriculum_key=level"], "data.curriculum_key"),
        ([f"{ROLLOUT}.val_kwargs.temperature=0.5", "data.val_files=v.json"], f"{ROLLOUT}.val_kwargs.temperature"),
        ([f"{ROLLOUT}.gpu_memory_utilization=0.5", "trainer.device=cpu"], f"{ROLLOUT}.gpu_memory_utilization"),
        ([f"{ACTOR}.fsdp_config.param_offload=True", "trainer.device=cpu"], f"{ACTOR}.fsdp_config.param_offload"),
        (["actor_rollout_ref.ref.fsdp_config.param_offload=True"], "actor_rollout_ref.ref.fsdp_config.param_offload"),
        ([f"{ACTOR}.fsdp_config.fsdp_size=2"], f"{ACTOR}.fsdp_config.fsdp_size"),
        (["critic.fsdp_config.fsdp_size=2", "algorithm.adv_estimator=gae"], "critic.fsdp_config.fsdp_size"),
        (["reward_model.max_length=9"], "reward_model.max_length"),
        (["algorithm.adv_estimator=gae", "critic.optim.min_lr_ratio=0.1"], "critic.optim.min_lr_ratio"),
        (["trainer.exact=True", "trainer.rollout_mismatch_tol=0.1"], "trainer.rollout_mismatch_tol"),
    ],
)
def test_a_set_key_without_effect_is_noted(load, args, key):
    notes = load("algorithm.adv_estimator=grpo", *args).notes
    assert sum(f"{key} has no effect" in note for note in notes) == 1


def test_keys_with_effect_are_not_noted(load):
    keys = ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-4", "algorithm.lam=0.9", f"{ACTOR}.use_kl_loss=True"]
    notes = load(*keys, f"{ACTOR}.kl_loss_coef=0.01", f"{MODEL}.lora_rank=8", f"{MODEL}.lora_alpha=32").notes
    assert not any("no effect" in note for note in notes)


# Configurations of which each condition that is a function holds in one and fails in another.
SITUATIONS = [
    {},
    {"data.val_files": "v.json"},
    {"algorithm.use_kl_in_reward": True, f"{ACTOR}.use_kl_loss": True},
    {"data.filter_overlong_prompts": True},
    {"data.filter_overlong_prompts": False},
    {"data.sampler": "curriculum"},
    {f"{ACTOR}.clip_ratio_low": 0.2, f"{ACTOR}.clip_ratio_high": 0.2},
    {"trainer.device": "cpu"},
    {"trainer.device": "cuda"},
    {"trainer.nnodes": 2},
    {f"{ROLLOUT}.n_workers": 1},
    {"data.multiturn.enable": True},
    {"optim.lr_scheduler_type": "constant"},
    {"optim.lr_scheduler_type": "cosine"},
]


def values_of(leaf, also):
    """Values that a setting may have, `also` among them if it may."""
    for text in (also, "True", "False", "null", "-1", "0", "1", "text", *leaf.choices):
        with suppress(WrongValue):
            value = convert(text, leaf.hint)
            is_allowed = leaf.range is None or (value is not None and leaf.range.allows(value))
            if value is None or (is_allowed and value in (leaf.choices or (value,))):
                yield value


def answers(idle, root):
    """What a condition is in configurations that differ in what it reads."""
    situations = SITUATIONS
    if idle.condition is None:
        key, _, value = idle.reason.partition(",")[0].partition(" is ")
        situations = [{key: value} for value in values_of(leaves(root)[key], value.removeprefix("not "))]
    for situation in situations:
        if situation.keys() <= leaves(root).keys():
            config = root()
            for key, value in situation.items():
                assign(config, key, value)
            yield holds(idle, config)


@pytest.mark.parametrize("root", PROGRAMS, ids=lambda root: root.__name__)
def test_each_condition_under_which_a_setting_has_no_effect_can_hold_and_can_fail(root):
    conditions = {idle for leaf in leaves(root).values() for idle in leaf.idle}
    assert len(conditions) > 5
    assert [idle.reason for idle in conditions if set(answers(idle, root)) != {True, False}] == []


@pytest.mark.parametrize(
    ("condition", "config", "is_idle"),
    [
        ("trainer.exact is True", {"trainer.exact": True}, True),
        ("trainer.exact is true", {"trainer.exact": True}, True),
        ("trainer.exact is not true", {"trainer.exact": True}, False),
        ("trainer.nnodes is 2", {"trainer.nnodes": 2}, True),
        ("trainer.nnodes is not 2, and so on", {"trainer.nnodes": 3}, True),
        ("data.val_files is null", {}, True),
        ("trainer.export_hf is none", {"trainer.export_hf": "none"}, True),
    ],
)
def test_a_condition_compares_with_its_value_as_the_type_of_the_setting(condition, config, is_idle):
    assert holds(Idle(condition), load_config(config).config) is is_idle


@pytest.mark.parametrize("value", ["trainer.exact is sometimes", "trainer.nnodes is 0", "trainer.export_hf is never"])
def test_a_condition_with_a_value_that_the_setting_cannot_have_is_an_error(value):
    key, said = value.split(" is ")
    with pytest.raises(ValueError, match=f"idle='{value}': {key} is never {said}"):
        holds(Idle(value), load_config({}).config)


def test_a_condition_that_names_no_setting_is_an_error_with_the_nearest_one():
    message = r"idle='data.val_file is not set': did you mean `data.val_files`\? there is no setting data.val_file"
    with pytest.raises(ValueError, match=message):
        holds(Idle("data.val_file is not set"), load_config({}).config)


def test_labels_that_are_defaults_are_not_explicit():
    labelled = [("data.train_batch_size=256", "default of train.sh"), ("preset=embedded", "train.sh")]
    resolved = load_config([], labelled=labelled)
    assert resolved.value("data.train_batch_size") == 256
    assert resolved.sources["data.train_batch_size"] == "default of train.sh"
    assert resolved.explicit == set()


def test_a_whole_tree_from_python_means_what_it_says():
    config = load_config(["algorithm.adv_estimator=grpo", "data.train_files=a.json", f"{MODEL}.path=a/b"]).config
    again = load_config({**config.to_dict(), "hydra": {"job": {}}})
    assert again.config == config
    assert again.explicit == {"algorithm.adv_estimator", "data.train_files", f"{MODEL}.path", f"{ROLLOUT}.n"}
    fresh = load_config({**config.to_dict(), "actor_rollout_ref.rollout.n": 1})
    assert fresh.value(f"{ROLLOUT}.n") == 5


def test_what_a_caller_provides_is_not_noted_as_missing():
    given = ["data.train_files", "data.val_files", "custom_reward_function.path"]
    resolved = load_config({"custom_reward_function.name": "f", f"{MODEL}.path": "a/b"}, provided=given)
    assert not any("validation" in note or "no effect" in note or "embedded" in note for note in resolved.notes)
    assert resolved.value("data.train_files") is None


def test_of_one_group_the_last_choice_wins(load):
    assert load("algorithm=grpo", "algorithm=drgrpo").value(f"{ACTOR}.use_kl_loss") is False
