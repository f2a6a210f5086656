"""Every spelling that the documents use, and where they disagree."""

from __future__ import annotations

import pytest

from posttrain.config import ConfigError, load_config

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
BLOCK = """
algorithm:
  name: grpo
  group_size: 8
  clip_range: 0.2
  kl_coef: 0.0
  entropy_coef: 0.0
actor:
  model_name: Qwen/Qwen2.5-7B-Instruct
  learning_rate: 1e-6
  weight_decay: 0.01
  warmup_ratio: 0.1
  max_grad_norm: 1.0
rollout:
  engine: vllm
  temperature: 0.7
  top_p: 0.9
  max_new_tokens: 1024
  gpu_memory_utilization: 0.4
reward:
  type: function
  reward_fn: "rewards.math_reward"
data:
  train_path: "data/math_train.parquet"
  max_prompt_length: 512
trainer:
  total_epochs: 3
  save_steps: 100
  micro_batch_size: 2
  gradient_accumulation: 4
"""
FROM_BLOCK = {
    "S1-11": ("algorithm.adv_estimator", "grpo", "algorithm.name"),
    "S1-12": (f"{ROLLOUT}.n", 8, "algorithm.group_size"),
    "S1-13": (f"{ACTOR}.clip_ratio", 0.2, "algorithm.clip_range"),
    "S1-14": (f"{ACTOR}.use_kl_loss", False, "algorithm.kl_coef"),
    "S1-15": (f"{ACTOR}.entropy_coeff", 0.0, "algorithm.entropy_coef"),
    "S1-16": (f"{MODEL}.path", "Qwen/Qwen2.5-7B-Instruct", "actor.model_name"),
    "S1-17": (f"{ACTOR}.optim.lr", 1e-6, "actor.learning_rate"),
    "S1-18": (f"{ACTOR}.optim.weight_decay", 0.01, "actor.weight_decay"),
    "S1-19": (f"{ACTOR}.optim.lr_warmup_steps_ratio", 0.1, "actor.warmup_ratio"),
    "S1-20": (f"{ACTOR}.grad_clip", 1.0, "actor.max_grad_norm"),
    "S1-21": (f"{ROLLOUT}.name", "vllm", "rollout.engine"),
    "S1-22": (f"{ROLLOUT}.temperature", 0.7, "rollout.temperature"),
    "S1-23": (f"{ROLLOUT}.top_p", 0.9, "rollout.top_p"),
    "S1-24": ("data.max_response_length", 1024, "rollout.max_new_tokens"),
    "S1-25": (f"{ROLLOUT}.gpu_memory_utilization", 0.4, "rollout.gpu_memory_utilization"),
    "S1-27": ("custom_reward_function.path", "rewards.math_reward", "reward.reward_fn"),
    "S1-28": ("data.train_files", "data/math_train.parquet", "data.train_path"),
    "S1-29": ("data.max_prompt_length", 512, None),
    "S1-31": ("trainer.total_epochs", 3, None),
    "S1-32": ("trainer.save_freq", 100, "trainer.save_steps"),
    "S1-33": (f"{ACTOR}.ppo_micro_batch_size_per_gpu", 2, "trainer.micro_batch_size"),
    "S1-34": (f"{ACTOR}.ppo_mini_batch_size", 1, "trainer.gradient_accumulation"),
}


@pytest.fixture(scope="module")
def block(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doc1")
    (folder / "config").mkdir()
    (folder / "config" / "grpo.yaml").write_text(BLOCK)
    return load_config(["--config-path", "config", "--config-name", "grpo"], cwd=folder)


@pytest.mark.parametrize("row", list(FROM_BLOCK))
def test_a_key_of_document_1_resolves(block, row):
    key, value, spelling = FROM_BLOCK[row]
    assert block.value(key) == value and type(block.value(key)) is type(value)
    written = f", written `{spelling}`" if spelling else ""
    assert block.sources[key] == f"config/grpo.yaml{written}"
    assert key in block.explicit


def test_the_block_resolves_and_says_that_there_is_no_validation(block):
    assert block.value("data.val_files") is None
    assert sum("no validation" in note for note in block.notes) == 1


def test_the_kind_of_reward_switches_the_reward_model(load, problems):
    function = load("reward.type=function")
    assert function.value("custom_reward_function.path") is None and function.value("reward_model.enable") is False
    model = load("reward.type=model", "reward_model.model.path=a/b")
    assert model.value("reward_model.enable") is True and model.sources["reward_model.enable"].endswith("`reward.type`")
    assert "known: function, model" in problems("trainer.reward_fn.type=oracle")


def test_accumulation_becomes_a_mini_batch_in_prompts(load, problems):
    keys = ["trainer.micro_batch_size=6", "trainer.gradient_accumulation=5", "algorithm.adv_estimator=grpo"]
    resolved = load(*keys, f"{ROLLOUT}.n=3", "trainer.n_gpus_per_node=2", "data.train_batch_size=100")
    assert resolved.value(f"{ACTOR}.ppo_mini_batch_size") == 20
    assert any("6 (micro-batch) x 5 (accumulation) x 2 (workers) = 60 responses" in note for note in resolved.notes)
    text = problems(*keys, f"{ROLLOUT}.n=4")
    assert "= 30 responses" in text and "30 / 4 = 7.5" in text
    assert "both say" in problems(*keys, f"{ROLLOUT}.n=3", f"{ACTOR}.ppo_mini_batch_size=10")
    assert "needs a micro-batch size" in problems("trainer.gradient_accumulation=5")


def test_two_spellings_agree_or_are_refused(load, problems):
    assert load("algorithm.name=grpo", "algorithm.adv_estimator=grpo").value("algorithm.adv_estimator") == "grpo"
    text = problems("algorithm.name=grpo", "algorithm.adv_estimator=gae")
    assert "`algorithm.name` and `algorithm.adv_estimator`" in text and "'grpo' and 'gae'" in text
    assert load("trainer.seed=1").value("algorithm.adv_estimator") == "gae"


def test_two_spellings_in_one_file_name_the_file(problems, write):
    write("two.yaml", "algorithm: {group_size: 8}\nactor_rollout_ref: {rollout: {n: 4}}\n")
    text = problems("--config-path=.", "--config-name=two")
    assert "two.yaml" in text and "`algorithm.group_size`" in text and f"`{ROLLOUT}.n`" in text


def test_a_higher_rank_wins_whatever_the_spelling(load, write):
    write("low.yaml", "algorithm: {name: grpo, group_size: 8}\n")
    resolved = load("--config-path=.", "--config-name=low", f"{ROLLOUT}.n=4")
    assert resolved.value(f"{ROLLOUT}.n") == 4


@pytest.mark.parametrize("spelling", [f"{ROLLOUT}.n", "actor_rollout.ref.rollout.n", "algorithm.group_size"])
def test_responses_per_prompt(load, problems, spelling):
    assert load("algorithm.adv_estimator=grpo", f"{spelling}=3").value(f"{ROLLOUT}.n") == 3
    assert f"{ROLLOUT}.n=1" in problems("algorithm.adv_estimator=grpo", f"{spelling}=1")


def test_unset_is_5_under_grpo_and_1_under_gae(load):
    grpo = load("algorithm.adv_estimator=grpo")
    assert grpo.value(f"{ROLLOUT}.n") == 5 and f"{ROLLOUT}.n" not in grpo.explicit
    assert any("becomes 5" in note for note in grpo.notes)
    assert load("algorithm.adv_estimator=gae").value(f"{ROLLOUT}.n") == 1
    assert load("algorithm.adv_estimator=gae", f"{ROLLOUT}.n=1").value(f"{ROLLOUT}.n") == 1


def test_grpo_without_kl_is_allowed_and_said_once(load):
    notes = load("algorithm.adv_estimator=grpo").notes
    assert sum("no KL term" in note for note in notes) == 1
    assert not any("no KL term" in note for note in load("algorithm=grpo").notes)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["algorithm.kl_coef=0.01"], (True, 0.01, 0.001)),
        (["algorithm.kl_coef=0"], (False, 0.001, 0.001)),
        (["algorithm.kl_coef=0.01", "algorithm.use_kl_in_reward=True"], (False, 0.001, 0.01)),
    ],
)
def test_the_coefficient_means_the_loss_unless_kl_is_in_the_reward(load, args, expected):
    resolved = load("algorithm.adv_estimator=grpo", *args)
    keys = (f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", "algorithm.kl_ctrl.kl_coef")
    assert tuple(resolved.value(key) for key in keys) == expected
    assert any("algorithm.kl_coef" in note for note in resolved.notes)


def test_contradictions_and_a_zero_coefficient(load, problems):
    assert "keep one of them" in problems("algorithm.kl_coef=0.01", f"{ACTOR}.use_kl_loss=False")
    resolved = load(f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0")
    assert any("no reference model is loaded" in note for note in resolved.notes)
    from posttrain.config import needs_reference

    assert not needs_reference(resolved.config)
    assert needs_reference(load(f"{ACTOR}.use_kl_loss=True").config)


ONE_KEY = [
    ("D-03", "algorithm.clip_range=0.3", f"{ACTOR}.clip_ratio", 0.3),
    ("D-06", f"{ACTOR}.kl_loss_type=k3", f"{ACTOR}.kl_loss_type", "k3"),
    ("D-07", "algorithm.entropy_coef=0.1", f"{ACTOR}.entropy_coeff", 0.1),
    ("D-07", "algorithm.entropy_coeff=0.1", f"{ACTOR}.entropy_coeff", 0.1),
    ("D-07", f"{ACTOR}.entropy_coef=0.1", f"{ACTOR}.entropy_coeff", 0.1),
    ("D-07", f"{ACTOR}.entropy_coeff=0.1", f"{ACTOR}.entropy_coeff", 0.1),
    ("D-08", "actor.learning_rate=5e-7", f"{ACTOR}.optim.lr", 5e-7),
    ("D-09", "actor.model_name=a/b", f"{MODEL}.path", "a/b"),
    ("D-10", "rollout.engine=sglang", f"{ROLLOUT}.name", "sglang"),
    ("D-11", "rollout.max_new_tokens=7", "data.max_response_length", 7),
    ("D-12", "rollout.gpu_memory_utilization=0.4", f"{ROLLOUT}.gpu_memory_utilization", 0.4),
    ("D-13", f"{ROLLOUT}.tensor_parallel_size=2", f"{ROLLOUT}.tensor_model_parallel_size", 2),
    ("D-14", "data.val_path=v.parquet", "data.val_files", "v.parquet"),
    ("D-17", f"{ACTOR}.ppo_mini_batch_size=64", f"{ACTOR}.ppo_mini_batch_size", 64),
    ("D-18", "trainer.total_epochs=20", "trainer.total_epochs", 20),
    ("D-19", "trainer.save_steps=100", "trainer.save_freq", 100),
    ("D-21", "trainer.reward_fn.path=my_reward.fn", "custom_reward_function.path", "my_reward.fn"),
    ("D-21", "reward.reward_fn=rewards.math_reward", "custom_reward_function.path", "rewards.math_reward"),
    ("D-22", "data.train_files=rows.json", "data.train_files", "rows.json"),
    ("M-05", "actor_rollout.ref.actor.clip_ratio=0.3", f"{ACTOR}.clip_ratio", 0.3),
    ("M-18", f"{ACTOR}.policy_loss_fn=vanilla", f"{ACTOR}.policy_loss.loss_mode", "vanilla"),
]


@pytest.mark.parametrize(("row", "argument", "key", "value"), ONE_KEY, ids=[f"{r[0]}-{r[1]}" for r in ONE_KEY])
def test_a_spelling_resolves_to_its_canonical_key(load, row, argument, key, value):
    resolved = load("algorithm.adv_estimator=gae", argument)
    assert resolved.value(key) == value
    spelling = argument.split("=")[0]
    assert resolved.sources[key] == "command line" + ("" if spelling == key else f", written `{spelling}`")


def test_unset_sizes_are_not_explicit(load):
    resolved = load("data.train_files=a.parquet")
    assert resolved.value(f"{ROLLOUT}.gpu_memory_utilization") is None
    assert resolved.value("data.train_batch_size") == 1024 and "data.train_batch_size" not in resolved.explicit


def test_a_mini_batch_that_nobody_set_follows_a_small_batch(load, problems):
    resolved = load("data.train_batch_size=64", "data.train_files=a.parquet")
    assert resolved.value(f"{ACTOR}.ppo_mini_batch_size") == 64
    assert "larger than the batch" in problems("data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=128")


def test_lora_in_both_spellings(load, problems):
    peft = f"{ACTOR}.peft_config"
    keys = [f"{peft}.peft_type=lora", f"{peft}.lora_r=16", f"{peft}.lora_alpha=32"]
    keys += [f"{peft}.target_modules=" + '["q_proj","v_proj"]', f"{ROLLOUT}.enable_lora=True"]
    resolved = load(*keys)
    names = ("lora_rank", "lora_alpha", "target_modules")
    assert [resolved.value(f"{MODEL}.{name}") for name in names] == [16, 32, ["q_proj", "v_proj"]]
    assert "rollout follows the actor" in problems(f"{ROLLOUT}.enable_lora=True")
    assert "rollout follows the actor" in problems(f"{MODEL}.lora_rank=8", f"{ROLLOUT}.enable_lora=False")
    assert "known: lora" in problems(f"{peft}.peft_type=ia3", f"{peft}.lora_r=16")


def test_key_wins_over_flag_over_environment_variable():
    labelled = [
        (f"{ACTOR}.optim.lr=1e-5", "environment variable LEARNING_RATE"),
        (f"{ROLLOUT}.n=3", "environment variable ROLLOUT_N"),
        ("trainer.total_epochs=2", "environment variable TOTAL_EPOCHS"),
        (f"{ACTOR}.use_kl_loss=1", "environment variable USE_KL_LOSS"),
        (f"{ACTOR}.kl_loss_type=", "environment variable KL_LOSS_TYPE"),
        (f"{ACTOR}.optim.lr=5e-7", "flag --lr"),
        ("trainer.total_epochs=20", "flag --epochs"),
    ]
    resolved = load_config(["trainer.total_epochs=30", "algorithm.adv_estimator=grpo"], labelled=labelled)
    expected = {
        f"{ACTOR}.optim.lr": (5e-7, "flag --lr"),
        f"{ROLLOUT}.n": (3, "environment variable ROLLOUT_N"),
        "trainer.total_epochs": (30, "command line"),
        f"{ACTOR}.use_kl_loss": (True, "environment variable USE_KL_LOSS"),
        f"{ACTOR}.kl_loss_type": ("low_var_kl", "default"),
    }
    assert {key: (resolved.value(key), resolved.sources[key]) for key in expected} == expected
    assert any("KL_LOSS_TYPE" in note and "empty" in note for note in resolved.notes)


@pytest.mark.parametrize(
    ("text", "value"), [("True", True), ("true", True), ("FALSE", False), ("0", False), ("1", True)]
)
def test_booleans_in_any_case(load, text, value):
    assert load(f"data.shuffle={text}").value("data.shuffle") is value


@pytest.mark.parametrize(
    ("key", "default"),
    [
        pytest.param("algorithm.adv_estimator", "gae", id="S2-33"),
        pytest.param(f"{ACTOR}.clip_ratio", 0.2, id="S2-32"),
        pytest.param(f"{ACTOR}.loss_agg_mode", "token-mean", id="S2-34"),
        pytest.param(f"{ACTOR}.use_kl_loss", False, id="S2-37"),
        pytest.param(f"{ACTOR}.kl_loss_coef", 0.001, id="S2-38"),
        pytest.param(f"{ACTOR}.ppo_epochs", 1, id="S2-31"),
        pytest.param("data.train_batch_size", 1024, id="S2-29"),
        pytest.param(f"{ACTOR}.ppo_mini_batch_size", 256, id="S2-30"),
    ],
)
def test_the_defaults_of_document_2(load, key, default):
    resolved = load("data.train_files=a.parquet")
    assert resolved.value(key) == default and resolved.sources[key] == "default"


MODES = ["seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KINDS = ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "k3+"]


@pytest.mark.parametrize(
    "argument", [f"{ACTOR}.loss_agg_mode={m}" for m in MODES] + [f"{ACTOR}.kl_loss_type={k}" for k in KINDS]
)
def test_to_S2_42_S2_44_options_are_accepted(load, argument):
    key, value = argument.split("=")
    assert load(argument).value(key) == value


def test_an_unknown_option_lists_the_known_ones(problems):
    assert "token-mean, token-sum" in problems(f"{ACTOR}.loss_agg_mode=token_mean")
    assert "kl, k1, abs, mse, k2, low_var_kl, k3" in problems(f"{ACTOR}.kl_loss_type=full")


def test_the_preset_drgrpo_equals_its_three_keys(load):
    keys = [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}.use_kl_loss=False"]
    keys += ["algorithm.norm_adv_by_std_in_grpo=False"]
    preset = load("algorithm=drgrpo")
    assert preset.values() == load("algorithm.adv_estimator=grpo", *keys).values()
    assert preset.value("algorithm.norm_adv_by_std_in_grpo") is False


def test_a_part_of_drgrpo_names_the_rest(load):
    resolved = load("algorithm=grpo", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm")
    note = next(note for note in resolved.notes if "DrGRPO" in note)
    assert "norm_adv_by_std_in_grpo=False" in note and "use_kl_loss=False" in note
    assert not any("DrGRPO" in note for note in load("algorithm=drgrpo").notes)


def test_the_slip_is_accepted_with_a_note(load):
    assert any("actor_rollout.ref.rollout.n" in note for note in load("actor_rollout.ref.rollout.n=4").notes)


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "0.000001", "1.0e-06"])
def test_a_number_is_a_number_everywhere(load, write, text):
    write("a.yaml", f"actor_rollout_ref: {{actor: {{optim: {{lr: {text}}}}}}}\n")
    key = f"{ACTOR}.optim.lr"
    assert load("--config-path=.", "--config-name=a").value(key) == 1e-6
    assert load(f"{key}={text}").value(key) == 1e-6
    assert load_config([], labelled=[(f"{key}={text}", "environment variable LEARNING_RATE")]).value(key) == 1e-6


def test_secrets_are_masked_and_empty_means_not_given(load):
    secret = "custom_reward_function.reward_kwargs.api_key"
    resolved = load("custom_reward_function.path=r.py", f"{secret}=sk-123", "trainer.project_name=")
    assert resolved.config.custom_reward_function.reward_kwargs == {"api_key": "sk-123"}
    assert "sk-123" not in resolved.to_yaml() + resolved.describe() and "***" in resolved.describe()
    assert resolved.value("trainer.project_name") == "posttrain"
    assert any("trainer.project_name" in note and "empty" in note for note in resolved.notes)
    assert "ppo_max_token_len_per_gpu: 16384" in resolved.to_yaml()


FULL_EXAMPLE = {
    "algorithm.adv_estimator": ("grpo", "grpo"),
    "algorithm.use_kl_in_reward": ("False", False),
    "data.train_files": ("gsm8k/train.parquet", "gsm8k/train.parquet"),
    "data.val_files": ("gsm8k/test.parquet", "gsm8k/test.parquet"),
    "data.train_batch_size": ("1024", 1024),
    "data.max_prompt_length": ("512", 512),
    "data.max_response_length": ("1024", 1024),
    f"{MODEL}.path": ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
    f"{MODEL}.use_remove_padding": ("True", True),
    f"{ACTOR}.optim.lr": ("1e-6", 1e-6),
    f"{ACTOR}.ppo_mini_batch_size": ("256", 256),
    f"{ACTOR}.use_kl_loss": ("True", True),
    f"{ACTOR}.kl_loss_coef": ("0.001", 0.001),
    f"{ACTOR}.kl_loss_type": ("low_var_kl", "low_var_kl"),
    f"{ROLLOUT}.name": ("vllm", "vllm"),
    f"{ROLLOUT}.tensor_model_parallel_size": ("2", 2),
    f"{ROLLOUT}.n": ("5", 5),
    "trainer.n_gpus_per_node": ("8", 8),
    "trainer.nnodes": ("1", 1),
    "trainer.total_epochs": ("15", 15),
    "trainer.project_name": ("verl_grpo_example", "verl_grpo_example"),
    "trainer.experiment_name": ("qwen3_8b_grpo", "qwen3_8b_grpo"),
}


def test_to_S0_15_S0_49_S0_50_the_22_keys_of_the_full_example_resolve(load):
    resolved = load(*(f"{key}={text}" for key, (text, _) in FULL_EXAMPLE.items()))
    assert {key: resolved.value(key) for key in FULL_EXAMPLE} == {
        key: value for key, (_, value) in FULL_EXAMPLE.items()
    }
    assert {resolved.sources[key] for key in FULL_EXAMPLE} == {"command line"}
    assert resolved.explicit == set(FULL_EXAMPLE) and len(FULL_EXAMPLE) == 22
    assert not any("no effect" in note for note in resolved.notes)


def test_two_reward_functions_are_an_error(problems):
    text = problems("trainer.reward_fn.path=a.f", "custom_reward_function.path=b.py")
    assert "`trainer.reward_fn.path`" in text and "'a.f' and 'b.py'" in text


def test_the_last_value_of_a_key_counts_also_where_a_script_uses_two_spellings():
    """A script's own keys, and behind them those that replace them."""
    script = ["data.max_response_length=512", "actor_rollout_ref.rollout.response_length=512"]
    behind = ["data.max_response_length=8", "actor_rollout_ref.rollout.response_length=8"]
    assert load_config([*script, *behind]).value("data.max_response_length") == 8
    with pytest.raises(ConfigError, match="two spellings"):
        load_config([*script, behind[0]])


@pytest.mark.parametrize("first", ["multi_turn", "tools"])
def test_tools_and_turns_of_a_file_are_one_dict_in_any_order(load, tmp_path, monkeypatch, first):
    monkeypatch.chdir(tmp_path)
    given = {"multi_turn": "{enable: true, max_parallel_calls: 2}", "tools": "[calculator]"}
    lines = [f"    {name}: {given[name]}" for name in sorted(given, key=lambda name: name != first)]
    text = "actor_rollout_ref:\n  rollout:\n" + "\n".join(lines) + "\n    tool_config: {search: {corpus: a.jsonl}}\n"
    (tmp_path / "mine.yaml").write_text(text)
    found = load("--config-path", ".", "--config-name", "mine", "rollout.max_turns=3").config.actor_rollout_ref.rollout
    assert found.multi_turn == {
        "enable": True,
        "max_parallel_calls": 2,
        "tools": ["calculator"],
        "tool_config": {"search": {"corpus": "a.jsonl"}},
        "max_assistant_turns": 3,
    }
