"""Every key known of verl gets one of four answers, and the answer is what happens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from posttrain.config import load_config
from posttrain.config.merge import Entry, Merged
from posttrain.config.schema import leaves
from posttrain.config.trees import PPO, SFT
from posttrain.config.values import split_hint
from posttrain.other_systems.verl.answers import PPO_RULES, all_answers, apply_answers
from posttrain.other_systems.verl.rule import HONOURED, KINDS, NOT_NEEDED, NOT_SUPPORTED, TRANSLATED, Rule
from posttrain.other_systems.verl.run import GENERATION, SUPERVISED_RULES
from posttrain.other_systems.verl.translations import TRANSLATIONS

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
REF, CORRECTION = "actor_rollout_ref.ref", "algorithm.rollout_correction"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
TURNS = "actor_rollout_ref.rollout.multi_turn"
POOL, SCORERS = "reward_model", "reward_model.n_workers"
BY_MEGATRON = [f"{ACTOR}.strategy=megatron", "trainer.n_workers=2"]
TREES = {"main_ppo": PPO, "sft_trainer": SFT}
ANSWERS = {key: (program, found) for key, program, found in all_answers()}


def keys_with(kind: str, program: str) -> list[str]:
    return [key for key, (of, found) in ANSWERS.items() if of == program and found and found.kind == kind]


def answered(program: str, **values: Any) -> Merged:
    """These keys alone, taken in and answered."""
    merged = Merged(TREES[program])
    for key, value in values.items():
        merged.add(Entry(value, key, "command line", 1))
    apply_answers(merged)
    return merged


def test_every_known_key_gets_one_of_the_four_answers():
    assert len(ANSWERS) > 1600 and not [key for key, (_, found) in ANSWERS.items() if found is None]
    counted = Counter(found.kind for _, found in ANSWERS.values() if found)
    assert set(counted) == set(KINDS) and counted[HONOURED] + counted[TRANSLATED] > 300


def test_an_answer_says_why_and_what_to_do():
    for key, (_, found) in ANSWERS.items():
        assert found is not None
        assert found.kind == HONOURED or found.says, key
        if found.kind == NOT_SUPPORTED and found.rule:
            assert found.rule.do, key


@pytest.mark.parametrize("program", list(TREES))
def test_a_key_that_is_not_needed_becomes_a_note_and_nothing_else(program):
    for key in keys_with(NOT_NEEDED, program):
        merged = answered(program, **{key: "7"})
        assert len(merged.notes) == 1 and f"`{key}` is not needed here" in merged.notes[0], key
        assert not merged.problems and not merged.entries, key


@pytest.mark.parametrize("program", list(TREES))
def test_a_key_that_is_not_supported_is_an_error_with_a_reason_and_a_way_out(program):
    for key in keys_with(NOT_SUPPORTED, program):
        rule = ANSWERS[key][1].rule  # type: ignore[union-attr]
        if rule is None or key.startswith("hydra."):
            continue
        values = dict.fromkeys([f"{ACTOR}.optim.lr_scheduler_type", "critic.optim.lr_scheduler_type"], "cosine")
        values = values if program == "main_ppo" else {"optim.lr_scheduler_type": "cosine"}
        values[key] = "wobble"
        if rule.switch:
            values[rule.switch_of(key)] = "True"
        problems = answered(program, **values).problems
        assert any(f"`{key}=" in str(problem) and rule.do in str(problem) for problem in problems), key


def rules_with_a_way_to_be_off() -> list[tuple[str, Rule]]:
    rules = {found.rule: key for key, (_, found) in ANSWERS.items() if found and found.rule}
    return [(key, rule) for rule, key in rules.items() if rule.kind == NOT_SUPPORTED and rule.off]


@pytest.mark.parametrize(("key", "rule"), rules_with_a_way_to_be_off())
def test_an_unsupported_key_that_asks_for_nothing_is_only_noted(key, rule):
    for value in (rule.off[0], "null"):
        merged = answered(ANSWERS[key][0], **{key: value})
        assert not merged.problems and "not needed" in merged.notes[0], (key, value)


SPECIAL: dict[str, str] = {
    "algorithm.adv_estimator": "rloo",
    "algorithm.filter_groups.metric": "acc",
    f"{CORRECTION}.rollout_rs": "seq_mean_k1",
    f"{CORRECTION}.rollout_rs_threshold": "0.5_2.0",
    f"{CORRECTION}.rollout_is_threshold": "3.0",
    f"{ACTOR}.policy_loss.loss_mode": "sapo",
    f"{ACTOR}.optim.betas": "[0.8, 0.9]",
    f"{ACTOR}.clip_ratio_c": "5.0",
    f"{ACTOR}.policy_loss.cppo_delta_b_max_mult": "2.0",
    "critic.optim.betas": "[0.8, 0.9]",
    "optim.betas": "[0.8, 0.9]",
    "fsdp.strategy": "fsdp",
    "optim.lr_scheduler_type": "linear",
    "data.train_batch_size": "2048",
    "trainer.logger": "[console,tensorboard]",
    "actor_rollout_ref.rollout.multi_turn.enable": "True",
    "actor_rollout_ref.rollout.multi_turn.format": "hermes",
    "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side": "left",
    "actor_rollout_ref.rollout.engine_kwargs.vllm": "{block_size: 7}",
    "actor_rollout_ref.rollout.engine_kwargs.sglang": "{page_size: 7}",
    "trainer.device": "cpu",
    "trainer.resume_mode": "resume_path",
}
"""Honoured key -> a value other than its default, where the type alone does not give one."""


def other_value(key: str, program: str) -> str:
    """A value that is allowed and not the default."""
    leaf = TREES[program].leaf_of(key)
    assert leaf is not None
    kind, default = split_hint(leaf.hint)[0], leaf.default
    if key in SPECIAL or leaf.key != key:
        return SPECIAL.get(key, "7")
    if leaf.choices:
        return next(name for name in leaf.choices if name not in (default, "auto"))
    if kind is bool:
        return str(not default)
    if kind is int:
        return str(max(default or 0, 3) + 1)
    if leaf.key == "trainer.profile_steps":
        return "[3]"
    return "0.25" if kind is float else "{depth: 7}" if leaf.free_keys else "[one]"


REPLAY = ("actor_rollout_ref.actor.router_replay.mode", "actor_rollout_ref.rollout.enable_rollout_routing_replay")
"""Rejected beside engines that are not posttrain's own."""


def test_routes_of_experts_are_replayed_by_verls_keys():
    assert set(REPLAY) <= set(keys_with(HONOURED, "main_ppo"))
    both = load_config([f"{REPLAY[0]}=R3", f"{REPLAY[1]}=True"], tree=TREES["main_ppo"])
    alone = load_config([f"{REPLAY[0]}=R3"], tree=TREES["main_ppo"])
    assert [both.value(key) for key in REPLAY] == [alone.value(key) for key in REPLAY] == ["R3", True]


@pytest.mark.parametrize("program", list(TREES))
def test_every_honoured_key_changes_the_resolved_configuration(program):
    table = leaves(TREES[program].root)
    values = {key: other_value(key, program) for key in keys_with(HONOURED, program) if key not in REPLAY}
    whole = {key for key in values if key in table}
    both = ["algorithm.allow_both_kl=True"] if program == "main_ppo" else []
    resolved = load_config([f"{key}={value}" for key, value in values.items()] + both, tree=TREES[program])
    same = [key for key in whole if resolved.value(key) == table[key].default]
    assert not same
    assert all(resolved.sources[key].startswith("command line") for key in whole)
    if program == "main_ppo":
        assert resolved.value(f"{MODEL}.override_config")["attention_dropout"] == 7
        assert resolved.value("data.apply_chat_template_kwargs")["enable_thinking"] == 7


def renamed(program: str) -> list[tuple[str, str]]:
    """(spelling, setting) of the keys that only have another name."""
    names = TREES[program]
    found = [(key, names.canonical(key).key) for key in keys_with(TRANSLATED, program)]
    return [(key, target) for key, target in found if target in names.leaves]


@pytest.mark.parametrize("program", list(TREES))
def test_a_renamed_key_sets_the_setting_that_it_stands_for(program):
    pairs = renamed(program)
    assert len(pairs) > 5
    values = {key: other_value(target, program) for key, target in pairs}
    for key, target in pairs:
        entries = answered(program, **{key: values[key]}).entries
        assert set(entries) == {target} and entries[target].value == values[key], key
        assert entries[target].where(target) == f"command line, written `{key}`", key
    arguments = [f"{key}={value}" for key, value in values.items()]
    resolved = load_config([*arguments, "trainer.n_gpus_per_node=8"], tree=TREES[program])
    assert all("written" in resolved.sources[target] for _, target in pairs)


MICRO = "ppo_micro_batch_size_per_gpu"
APART = ["actor_rollout_ref.rollout.n_workers=1"]
CASES: dict[str, list[tuple[list[str], dict[str, Any] | str]]] = {
    "one_checkpoint": [
        (["trainer.remove_previous_ckpt_in_save=True"], {"trainer.max_ckpt_to_keep": 1}),
        (["trainer.remove_previous_ckpt_in_save=False"], {"trainer.max_ckpt_to_keep": None}),
    ],
    "dynamic": [
        ([f"{ACTOR}.{MICRO}=4", f"{ACTOR}.use_dynamic_bsz=True"], {f"{ACTOR}.{MICRO}": None}),
        ([f"{ACTOR}.{MICRO}=4", f"{ACTOR}.use_dynamic_bsz=False"], {f"{ACTOR}.{MICRO}": 4}),
        (["algorithm=ppo", f"critic.{MICRO}=4", "critic.use_dynamic_bsz=True"], {f"critic.{MICRO}": None}),
        (
            ["reward_model.micro_batch_size_per_gpu=4", "reward_model.use_dynamic_bsz=True"],
            {"reward_model.micro_batch_size_per_gpu": None},
        ),
        (
            ["reward_model.micro_batch_size_per_gpu=4", "reward_model.use_dynamic_bsz=False"],
            {"reward_model.micro_batch_size_per_gpu": 4},
        ),
        (
            ["sft", "data.micro_batch_size_per_gpu=4", "data.use_dynamic_bsz=True"],
            {"data.micro_batch_size_per_gpu": None},
        ),
    ],
    "share": [
        ([f"{ACTOR}.ppo_micro_batch_size=16", "trainer.n_gpus_per_node=8"], {f"{ACTOR}.{MICRO}": 2}),
        ([f"{ACTOR}.ppo_micro_batch_size=null", f"{ACTOR}.{MICRO}=3"], {f"{ACTOR}.{MICRO}": 3}),
        (["sft", "data.micro_batch_size=4"], {"data.micro_batch_size_per_gpu": 4}),
    ],
    "floor": [
        ([f"{ACTOR}.optim.lr=1e-5", f"{ACTOR}.optim.min_lr=1e-6"], {f"{ACTOR}.optim.min_lr_ratio": 0.1}),
        (["sft", "optim.lr=2e-5", "optim.lr_min=1e-6"], {"optim.min_lr_ratio": 0.05}),
    ],
    "cpu_optimizer": [
        (
            [f"+{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True"],
            {f"{ACTOR}.fsdp_config.optimizer_offload": True},
        ),
    ],
    "offload": [
        (
            [f"{ACTOR}.fsdp_config.offload_policy=True", f"{ACTOR}.fsdp_config.param_offload=False"],
            {f"{ACTOR}.fsdp_config.param_offload": True, f"{ACTOR}.fsdp_config.optimizer_offload": True},
        ),
        ([f"{REF}.fsdp_config.offload_policy=True"], {f"{REF}.fsdp_config.param_offload": True}),
    ],
    "deterministic": [([f"{ACTOR}.fsdp_config.full_determinism=True"], {"trainer.deterministic": True})],
    "dtype": [
        ([*BY_MEGATRON, f"{ACTOR}.megatron.dtype=float32"], {f"{MODEL}.dtype": "float32"}),
        ([f"{ACTOR}.megatron.dtype=float32"], {f"{MODEL}.dtype": "auto"}),
        ([f"{ACTOR}.fsdp_config.dtype=bf16"], {f"{MODEL}.dtype": "bfloat16"}),
        ([f"{ACTOR}.fsdp_config.dtype=fp8"], "set actor_rollout_ref.model.dtype to bfloat16"),
        (["sft", "engine.model_dtype=bf16"], {"model.dtype": "bfloat16"}),
    ],
    "stored_dtype": [
        ([f"{ACTOR}.fsdp_config.model_dtype=bf16"], {f"{MODEL}.dtype": "bfloat16"}),
        ([f"{ACTOR}.fsdp_config.model_dtype=fp32"], {f"{MODEL}.dtype": "auto"}),
    ],
    "contents": [
        ([f"{ACTOR}.checkpoint.save_contents=[model,hf_model,optimizer,extra]"], {"trainer.export_hf": "all"}),
        (["sft", "checkpoint.save_contents=[model,hf_model]"], {"trainer.export_hf": "all"}),
    ],
    "critic": [
        (["algorithm.adv_estimator=grpo", "critic.enable=True"], "the estimator grpo has none"),
        (["algorithm.adv_estimator=gae", "critic.enable=True"], {"algorithm.adv_estimator": "gae"}),
    ],
    "bypass": [
        ([f"{CORRECTION}.bypass_mode=true"], {f"{ACTOR}.old_log_probs": "rollout"}),
        ([f"{CORRECTION}.bypass_mode=False"], {f"{ACTOR}.old_log_probs": "trainer"}),
    ],
    "loss_type": [
        (
            [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.loss_type=reinforce", f"{LOSS}=vanilla"],
            {LOSS: "gpg", f"{ACTOR}.old_log_probs": "rollout"},
        ),
        ([f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.loss_type=ppo_clip"], {LOSS: "vanilla"}),
        ([f"{CORRECTION}.loss_type=reinforce"], {LOSS: "vanilla", f"{ACTOR}.old_log_probs": "auto"}),
        ([f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.loss_type=reinforce", f"{LOSS}=gspo"], "keep one of them"),
        ([f"{CORRECTION}.loss_type=other"], "neither ppo_clip nor reinforce"),
    ],
    "lower": [
        (
            [
                f"{CORRECTION}.rollout_rs=geometric",
                f"{CORRECTION}.rollout_rs_threshold=1.001",
                f"{CORRECTION}.rollout_rs_threshold_lower=0.999",
            ],
            {f"{CORRECTION}.rollout_rs": "seq_mean_k1", f"{CORRECTION}.rollout_rs_threshold": "0.999_1.001"},
        ),
    ],
    "gen_batch": [
        (["data.train_batch_size=64", "data.gen_batch_size=64"], {"data.train_batch_size": 64}),
        (["data.train_batch_size=64", "data.gen_batch_size=128"], "each step generates data.train_batch_size=64"),
        (
            ["algorithm=dapo", "data.gen_batch_size=1536", "algorithm.filter_groups.enable=True"],
            {"algorithm.filter_groups.enable": True},
        ),
    ],
    "manager": [
        (["reward_model.reward_manager=dapo"], {"reward_model.enable": False}),
        (["reward.reward_manager.name=batch"], "custom_reward_function.path=FILE"),
    ],
    "longest": [
        (
            ["data.max_response_length=99", "+reward_model.reward_kwargs.max_resp_len=99"],
            {"data.max_response_length": 99},
        ),
        (["data.max_response_length=99", "+reward.reward_kwargs.max_resp_len=98"], "set both to the same number"),
    ],
    "engine": [
        (["model_engine=megatron"], {f"{ACTOR}.strategy": "megatron"}),
        (["model_engine=veomni"], "set model_engine=dp"),
        (["model_engine=dp"], {f"{ACTOR}.strategy": "fsdp"}),
        (["sft", "engine=fsdp", "optim=fsdp"], {"fsdp.strategy": "fsdp2"}),
        (["sft", "engine=megatron", "optim=megatron"], {"fsdp.strategy": "megatron"}),
        (["sft", "engine=veomni"], "set engine=fsdp"),
    ],
    "megatron_offload": [
        ([*BY_MEGATRON, f"{ACTOR}.megatron.param_offload=True"], {f"{ACTOR}.fsdp_config.param_offload": True}),
        ([*BY_MEGATRON, f"{ACTOR}.megatron.optimizer_offload=True"], {f"{ACTOR}.fsdp_config.optimizer_offload": True}),
        ([f"{ACTOR}.megatron.param_offload=True"], {f"{ACTOR}.fsdp_config.param_offload": False}),
        ([*BY_MEGATRON, f"{REF}.megatron.param_offload=True"], {f"{REF}.fsdp_config.param_offload": True}),
        ([*BY_MEGATRON, "critic.megatron.optimizer_offload=True"], {"critic.fsdp_config.optimizer_offload": True}),
    ],
    "reward_model_pool": [
        ([f"{POOL}.enable_resource_pool=True", f"{POOL}.nnodes=2", f"{POOL}.n_gpus_per_node=4"], {SCORERS: 8}),
        ([f"{POOL}.enable_resource_pool=True", "trainer.n_gpus_per_node=2"], {SCORERS: 2}),
        ([f"reward.{POOL}.enable_resource_pool=True", f"reward.{POOL}.n_gpus_per_node=3"], {SCORERS: 3}),
        ([f"{POOL}.enable_resource_pool=False", f"{POOL}.nnodes=2"], {SCORERS: 0}),
        ([f"{POOL}.enable_resource_pool=True", f"{POOL}.nnodes=0"], "nnodes=0 x n_gpus_per_node=1 is no number"),
    ],
    "staleness": [
        ([*APART, "async_training.staleness_threshold=0.5"], {"trainer.max_staleness": 1}),
        ([*APART, "async_training.staleness_threshold=2"], {"trainer.max_staleness": 2}),
        ([*APART, "async_training.staleness_threshold=0"], {"trainer.max_staleness": 0}),
        ([*APART, "async_training.staleness_threshold=some"], "set trainer.max_staleness"),
        ([*APART, "async_training.staleness_threshold=inf"], "set trainer.max_staleness"),
        (["async_training.staleness_threshold=1"], "n_workers=1 or more, which only generate"),
    ],
    "partial": [
        ([*APART, "trainer.max_staleness=1", "async_training.partial_rollout=True"], {"trainer.partial_rollout": True}),
    ],
    "sync_step": [
        (
            [
                "data.train_batch_size=0",
                "data.gen_batch_size=1",
                f"{ACTOR}.ppo_mini_batch_size=32",
                "async_training.require_batches=2",
                "async_training.trigger_parameter_sync_step=4",
            ],
            {"data.train_batch_size": 256, f"{ACTOR}.ppo_mini_batch_size": 32},
        ),
        (
            ["data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=32", "async_training.require_batches=4"],
            {"data.train_batch_size": 64},
        ),
    ],
    "old_policy": [
        (["async_training.use_rollout_log_probs=True"], {f"{ACTOR}.old_log_probs": "rollout"}),
        (
            [
                *APART,
                "trainer.max_staleness=2",
                "data.train_batch_size=64",
                f"{ACTOR}.ppo_mini_batch_size=64",
                "async_training.use_rollout_log_probs=True",
                "async_training.compute_prox_log_prob=True",
            ],
            {f"{ACTOR}.old_log_probs": "auto", f"{CORRECTION}.rollout_is": "token"},
        ),
    ],
    "total_prompts": [
        (["data.train_batch_size=64", "rollout.total_rollout_steps=6400"], {"trainer.total_training_steps": 100}),
        (["rollout.total_rollout_steps=many"], "set trainer.total_training_steps"),
    ],
    "of_trainer": [(["rollout.test_freq=7"], {"trainer.test_freq": 7})],
    "sampler": [
        (["data.sampler.class_path=mine.py", "data.sampler.class_name=Mine"], {"data.sampler": "mine.py:Mine"}),
        (["data.sampler.class_path=null", "data.sampler.class_name=null"], {"data.sampler": "default"}),
        (["data.sampler.class_path=mine.py"], "set data.sampler=FILE.py:CLASS"),
    ],
    "user_turns": [
        ([f"{TURNS}.max_user_turns=2"], {TURNS: {"max_assistant_turns": 3}}),
        ([f"{TURNS}.max_user_turns=1", f"{TURNS}.max_assistant_turns=5"], {TURNS: {"max_assistant_turns": 2}}),
        ([f"{TURNS}.max_assistant_turns=2", f"{TURNS}.max_user_turns=4"], {TURNS: {"max_assistant_turns": 2}}),
        ([f"{TURNS}.max_user_turns=0"], {TURNS: {}}),
        ([f"{TURNS}.max_user_turns=few"], "set actor_rollout_ref.rollout.multi_turn.max_assistant_turns"),
    ],
    "megatron_sizes": [
        (
            [
                *BY_MEGATRON,
                f"{ACTOR}.megatron.tensor_model_parallel_size=2",
                f"{REF}.megatron.tensor_model_parallel_size=2",
            ],
            {f"{ACTOR}.strategy": "megatron"},
        ),
        ([*BY_MEGATRON, "critic.megatron.pipeline_model_parallel_size=2"], "cut as the actor is, over 1"),
    ],
    "supervised_sizes": [
        (
            ["sft", "engine.tensor_model_parallel_size=2", "engine=megatron", "trainer.n_workers=2"],
            {"fsdp.megatron_config": {"tensor_parallel_size": 2}},
        ),
        (["sft", "engine=fsdp", "engine.pipeline_model_parallel_size=2"], {"fsdp.megatron_config": {}}),
    ],
    "same_engine": [
        ([*BY_MEGATRON, "critic.strategy=megatron", f"{REF}.strategy=megatron"], {f"{ACTOR}.strategy": "megatron"}),
        ([*BY_MEGATRON, "critic.strategy=fsdp"], "set critic.strategy=megatron"),
        ([f"{REF}.strategy=megatron"], "set actor_rollout_ref.ref.strategy=fsdp2"),
    ],
    "model_group": [(["sft", "model=hf_model"], {"model.lora_rank": 0}), (["sft", "model=vlm"], "set model.path")],
}
"""Name of a translation -> (arguments, what they resolve to, or what is said instead)."""


def test_every_translation_has_a_case():
    assert set(CASES) == set(TRANSLATIONS)
    used = {rule.how for rule in (*PPO_RULES, *SUPERVISED_RULES) if rule.how}
    assert used == set(TRANSLATIONS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trainer.n_gpus_per_node=0", f"{ACTOR}.ppo_micro_batch_size=4"], "`trainer.n_gpus_per_node=0` is out of"),
        (
            [f"{ACTOR}.ppo_mini_batch_size=0", "data.train_batch_size=0", "rollout.total_rollout_steps=9"],
            f"`{ACTOR}.ppo_mini_batch_size=0` is out of range",
        ),
        ([f"{POOL}.enable_resource_pool=True", "trainer.n_gpus_per_node=inf"], "expected an integer, got 'inf'"),
        ([f"{POOL}.reward_kwargs.max_resp_len=8", "data.max_response_length=nan"], "expected an integer, got 'nan'"),
    ],
)
def test_a_translation_leaves_an_impossible_value_of_another_key_to_its_own_error(problems, arguments, said):
    assert said in problems(*arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"), [pytest.param(*case, id=how) for how, cases in CASES.items() for case in cases]
)
def test_a_translated_key_means(problems, arguments, expected):
    tree = SFT if arguments[0] == "sft" else PPO
    arguments = [argument for argument in arguments if argument != "sft"]
    if isinstance(expected, str):
        assert expected in problems(*arguments, tree=tree)
        return
    resolved = load_config(arguments, tree=tree)
    for key, value in expected.items():
        assert resolved.value(key) == (value if isinstance(value, dict) else pytest.approx(value)), key


def test_what_is_written_in_the_resolved_configuration_says_from_which_key(load):
    resolved = load(f"{ACTOR}.fsdp_config.full_determinism=True", "trainer.max_actor_ckpt_to_keep=3")
    assert resolved.sources["trainer.deterministic"] == f"command line, written `{ACTOR}.fsdp_config.full_determinism`"
    assert "max_actor_ckpt_to_keep" in resolved.sources["trainer.max_ckpt_to_keep"]


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_a_key_of_verl_may_be_added(load, sign):
    resolved = load(f"{sign}{ROLLOUT}.n=7", f"{sign}{ROLLOUT}.enforce_eager=False", "algorithm=grpo")
    assert resolved.value(f"{ROLLOUT}.n") == 7 and any("enforce_eager" in note for note in resolved.notes)


def test_a_removed_key_has_its_default(load, write):
    write("mine.yaml", "trainer: {seed: 9, balance_batch: true}\n")
    resolved = load("--config-path=.", "--config-name=mine", "~trainer.seed", "~trainer.balance_batch")
    assert resolved.value("trainer.seed") == 1 and resolved.sources["trainer.seed"] == "default"
    assert not any("`trainer.balance_batch`" in note for note in resolved.notes)


def test_keys_of_one_reason_are_told_in_one_sentence(load, problems):
    sizes = [f"{ACTOR}.torchtitan.{name}_model_parallel_size=2" for name in ("tensor", "pipeline", "expert")]
    text = problems(*sizes)
    assert text.startswith("1 problem") and "`critic.strategy=fsdp2" not in text and "strategy=fsdp2" in text
    sizes = [size.replace("torchtitan", "megatron") for size in sizes]
    resolved = load(*sizes, f"{ACTOR}.strategy=fsdp2")
    assert sum("megatron" in note for note in resolved.notes) == 1


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ([f"{ACTOR}.clip_ratio_low=1"], f"{ACTOR}.clip_ratio_low", 1.0),
        (['trainer.logger=["console","file"]'], "trainer.logger", ["console"]),
        (["trainer.logger=['console', 'tensorboard']"], "trainer.logger", ["console", "tensorboard"]),
        (["trainer.logger=console,file"], "trainer.logger", ["console"]),
        (["data.train_files='a.parquet'"], "data.train_files", "a.parquet"),
        (["data.train_files=\"['a.parquet', 'b.parquet']\""], "data.train_files", ["a.parquet", "b.parquet"]),
        (
            [f"{ROLLOUT}.val_kwargs.temperature=0", f"{ROLLOUT}.val_kwargs.do_sample=True"],
            f"{ROLLOUT}.val_kwargs.do_sample",
            False,
        ),
        (["trainer.save_freq=0"], "trainer.save_freq", -1),
        (["trainer.device=gpu"], "trainer.device", "cuda"),
        ([f"{MODEL}.use_remove_padding=False", "model_engine=megatron"], f"{MODEL}.use_remove_padding", True),
        ([f"{MODEL}.use_remove_padding=False", "model_engine=dp"], f"{MODEL}.use_remove_padding", False),
        (["trainer.test_freq=after_each_epoch", "trainer.total_epochs=1"], "trainer.test_freq", -1),
        (["actor_rollout_ref.model.lora_rank=0", "actor_rollout_ref.model.lora_alpha=0"], f"{MODEL}.lora_alpha", 16),
        (["algorithm.adv_estimator=grpo_vectorized"], "algorithm.adv_estimator", "grpo"),
        (["algorithm.adv_estimator=rloo_vectorized"], "algorithm.adv_estimator", "rloo"),
        (["reward_model.reward_manager=prime", "reward.num_workers=3"], "reward.num_workers", 3),
        (["algorithm.adv_estimator=gae", f"{ROLLOUT}.n=1"], f"{ROLLOUT}.n", 1),
        (["algorithm.adv_estimator=remax", f"{ROLLOUT}.n=1"], f"{ROLLOUT}.n", 1),
        (["algorithm.adv_estimator=reinforce_plus_plus", f"{ROLLOUT}.n=1"], f"{ROLLOUT}.n", 1),
    ],
)
def test_values_as_verls_users_write_them(load, arguments, key, value):
    assert load(*arguments).value(key) == value


def test_a_frequency_in_epochs_asks_for_steps_where_there_are_several(problems):
    text = problems("trainer.save_freq=after_each_epoch", "trainer.total_epochs=3")
    assert "how often is a number of steps" in text and "set trainer.save_freq to the steps of an epoch" in text


def test_the_keys_of_generation_are_those_that_its_entry_reads():
    from posttrain.trainer import main_generation as entry

    taken = {*entry.FLAGS, *entry.KEYS}
    for key, (kind, _) in GENERATION.items():
        assert (key in taken) == (kind in (HONOURED, TRANSLATED)), key
        assert (key in entry.IDLE) == (kind == NOT_NEEDED), key


def test_other_engines_name_the_override_that_makes_the_script_run(problems):
    text = problems(f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.enforce_eager=True", environment=True)
    assert f"set {ROLLOUT}.name=native" in text and "enforce_eager" not in text
    assert f"set {ROLLOUT}.name=native" in problems(f"{ROLLOUT}.name=trtllm")
    assert "strategy=fsdp2" in problems(f"{ACTOR}.strategy=veomni")


def test_verls_main_file_for_megatron_is_ours_with_its_engine_which_can_be_replaced(load, tmp_path):
    named = ["--config-path=config", "--config-name=ppo_megatron_trainer.yaml", f"{ACTOR}.megatron.param_offload=True"]
    resolved = load(*named)
    assert resolved.value(f"{ACTOR}.strategy") == "megatron" and resolved.value(f"{ACTOR}.fsdp_config.param_offload")
    resolved = load(*named, f"{ACTOR}.strategy=fsdp2")
    assert resolved.value(f"{ACTOR}.strategy") == "fsdp2"
    (tmp_path / "ppo_megatron_trainer.yaml").write_text("data:\n  train_batch_size: 3\n")  # a user's own file
    own = load("--config-name=ppo_megatron_trainer", f"--config-path={tmp_path}")
    assert own.value("data.train_batch_size") == 3
