"""Document 0, parts 1 and 2: each key does what the document says, seen on small runs.

Rows that end at the resolved configuration are tested in tests/config; those that are formulas in tests/algorithms.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import types
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from seen import chdir, groups, parity_reward, settings

import posttrain
from posttrain.algorithms import AdvantageEstimator
from posttrain.config import ConfigError, load_config
from posttrain.config.root import PPOConfig
from posttrain.config.schema import leaves
from posttrain.planning.budgets import fit_sizes
from posttrain.trainer import main_ppo as entry

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
MINI = "actor_rollout_ref__actor__ppo_mini_batch_size"
N = "actor_rollout_ref__rollout__n"
PACKAGE = Path(posttrain.__file__).parent


def problems(*overrides: str) -> str:
    """The refusal of these overrides, on this machine."""
    with pytest.raises(ConfigError) as caught:
        load_config(list(overrides), environment=True)
    return str(caught.value)


def test_the_entry_prints_the_composed_tree_as_yaml(capsys, monkeypatch):
    import yaml

    monkeypatch.setattr(sys, "argv", ["main_ppo", "--cfg", "job"])
    assert entry.cli() == 0
    assert set(yaml.safe_load(capsys.readouterr().out)) >= {"algorithm", "data", "actor_rollout_ref", "trainer"}


def test_only_gae_builds_a_critic_and_logs_a_value_loss(gae, small):
    grpo = small()
    ours, theirs = gae.config, grpo.config
    assert {key for key in leaves(PPOConfig) if _value(ours, key) != _value(theirs, key)} == {"algorithm.adv_estimator"}
    for line in gae.steps:
        assert line["critic/vf_loss"] > 0 and line["critic/optimizer_steps"] == 1
    critic = gae.trainer.critic_wg.worker.engine
    assert critic.optimizer.steps_done == 2
    assert "values" in gae.trainer.batches[0].batch
    assert (gae.path / "checkpoints/global_step_2/critic").is_dir()
    assert grpo.trainer.critic_wg is None
    assert not [name for line in grpo.steps for name in line if name.startswith(("critic/v", "critic/opt"))]
    assert "values" not in grpo.trainer.batches[0].batch
    assert not (grpo.path / "checkpoints/global_step_2/critic").exists()
    assert ", critic" in gae.console and ", critic" not in grpo.console


def _value(tree: dict, key: str):
    if key.startswith("trainer.default_local_dir"):
        return None  # each run has its own
    for name in key.split("."):
        tree = tree[name]
    return tree


def test_the_four_keys_on_the_command_line_train(main_ppo, parquet, brief_model):
    rows = f"{MODEL}.path={brief_model}", "data.train_batch_size=4", "trainer.total_training_steps=1"
    sizes = "data.max_prompt_length=32", "data.max_response_length=6", f"{ACTOR}.ppo_mini_batch_size=4"
    seen = main_ppo(
        "algorithm.adv_estimator=grpo", f"data.train_files={parquet['train']}", f"{ROLLOUT}.n=5", *rows, *sizes
    )
    assert seen.status == 0
    assert "Configuration: posttrain/trainer/config/ppo_trainer.yaml and the command line" in seen.console
    assert len(seen.samples()) == 20


def test_a_run_goes_on_without_loggers_that_are_not_installed(main_ppo, parquet, brief_model, monkeypatch):
    names = ("wandb", "mlflow", "swanlab", "trackio", "tensorboard")
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    seen = main_ppo(
        f"trainer.logger={json.dumps(['console', *names])}",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={parquet['train']}",
        *(f"{MODEL}.path={brief_model}", "data.train_batch_size=4", "trainer.total_training_steps=1"),
        *(
            "data.max_prompt_length=32",
            "data.max_response_length=6",
            f"{ACTOR}.ppo_mini_batch_size=4",
            f"{ROLLOUT}.n=5",
        ),
    )
    assert seen.status == 0 and len(seen.steps) == 1
    before_loading = seen.console.partition("step 0")[0]
    for name in names:
        assert f"the package {name} is not installed: the run continues without it" in before_loading
        assert f'pip install "posttrain[{name}]" (or pip install {name})' in before_loading
        assert seen.console.count(f"package {name} is not installed") == 1, "said once"


def test_a_misspelt_logger_ends_the_run_before_it_starts(main_ppo, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["main_ppo", 'trainer.logger=["console","wandbb"]'])
    assert entry.cli() == 2
    assert "did you mean `wandb`" in capsys.readouterr().err


def test_the_estimator_is_named_once_and_groups_sum_to_zero(grpo, gae):
    for text in (grpo.console, grpo.log):
        assert text.splitlines().count("Using advantage estimator: grpo") == 1
    assert gae.log.splitlines().count("Using advantage estimator: gae") == 1
    assert "estimator: grpo" not in gae.log
    assert grpo.config["algorithm"]["adv_estimator"] == "grpo"
    for step in (1, 2):
        for rows in groups(grpo.samples(step)).values():
            assert abs(sum(row["advantages"][0] for row in rows)) < 1e-5
    assert any(row["advantages"][0] > 0.1 for row in grpo.samples())


def test_prompts_come_from_the_files_given(small, parquet, sums, tmp_path):
    asked = {row["prompt"] for row in pq.read_table(parquet["train"]).to_pylist()}
    assert {_question(row) for row in small().samples()} <= asked
    second = tmp_path / "second.jsonl"
    second.write_text("".join(json.dumps({"prompt": f"letter {c}", "ground_truth": c}) + "\n" for c in "abcd"))
    both = small(
        data__train_files=[str(parquet["train"]), str(second)],
        data__train_max_samples=-1,
        data__train_batch_size=len(asked) + 4,
        trainer__total_training_steps=1,
    )
    assert {_question(row) for row in both.samples()} == asked | {f"letter {c}" for c in "abcd"}


def _question(row: dict) -> str:
    return row["prompt"].removeprefix("<|user|>").removesuffix("<|end|><|assistant|>")


@pytest.mark.parametrize("n", [5, 3])
def test_each_prompt_has_n_samples_with_one_uid(small, n):
    seen = small(actor_rollout_ref__rollout__n=n)
    for step in (1, 2):
        found = groups(seen.samples(step))
        assert Counter(map(len, found.values())) == {n: 4}
        assert all(len({row["prompt"] for row in rows}) == 1 for rows in found.values())


def test_halving_the_mini_batch_doubles_the_optimizer_steps(small):
    steps = {size: small(**{MINI: size, "data__train_batch_size": 8}) for size in (8, 4, 2)}
    assert {size: seen.updates for size, seen in steps.items()} == {8: 2, 4: 4, 2: 8}  # in two training steps
    assert [line["actor/optimizer_steps"] for line in steps[2].steps] == [4, 4]
    config = load_config([f"{ACTOR}.ppo_mini_batch_size=256", "data.train_batch_size=1024"]).config
    assert fit_sizes(config, set(), rows=1024)[0].updates_per_step == 4


def test_four_passes_make_four_times_the_optimizer_steps(small):
    more = {MINI: 2}
    once, four = small(**more), small(**more, actor_rollout_ref__actor__ppo_epochs=4)
    assert (once.updates, four.updates) == (4, 16)
    assert [line["actor/optimizer_steps"] for line in four.steps] == [8, 8]


def test_to_S0_21_S0_23_a_run_from_an_edited_copy_of_the_main_file(main_ppo, tmp_path, brief_model, four_rows):
    (tmp_path / "mine").mkdir()
    copy = tmp_path / "mine" / "my_grpo_config.yaml"
    shutil.copy(PACKAGE / "trainer/config/ppo_trainer.yaml", copy)
    text = copy.read_text()
    assert "adv_estimator: gae" in text
    actor = "{ppo_mini_batch_size: 2, use_kl_loss: True, kl_loss_coef: 0.5}"
    block = f"\nactor_rollout_ref:\n  rollout: {{n: 3}}\n  actor: {actor}\n"
    copy.write_text(text.replace("adv_estimator: gae", "adv_estimator: grpo") + block)
    more = ["data.max_prompt_length=64", "data.max_response_length=4", "trainer.total_training_steps=1"]
    more += [f"{MODEL}.path={brief_model}", f"data.train_files={four_rows}", "data.train_batch_size=4"]
    seen = main_ppo("--config-path=mine", "--config-name=my_grpo_config", *more)
    assert seen.status == 0 and "Configuration: mine/my_grpo_config.yaml" in seen.console
    assert "Using advantage estimator: grpo" in seen.log
    assert len(seen.samples()) == 4 * 3 and seen.updates == 2
    line = seen.steps[0]
    assert line["actor/kl_term"] == pytest.approx(0.5 * line["kl_loss"])


def test_the_kl_loss_loads_a_reference_and_without_it_there_is_none(small, grpo):
    without = small()
    assert grpo.trainer.actor_rollout_wg.worker.reference.engine is not None
    assert all("kl_loss" in line for line in grpo.steps)
    assert "actor, rollout, reference" in grpo.console
    assert without.trainer.actor_rollout_wg.worker.reference.engine is None and "reference" not in _roles(
        without.console
    )
    assert "ref_log_prob" not in without.trainer.batches[0].batch
    for line in without.steps:
        assert "kl_loss" not in line and line["actor/loss"] == line["policy_loss"]
    in_reward = small(algorithm__use_kl_in_reward=True)
    assert in_reward.trainer.actor_rollout_wg.worker.reference.engine is not None
    assert all("kl_loss" not in line for line in in_reward.steps)


def test_entropy_is_measured_and_enters_the_loss_only_by_its_coefficient(small):
    """0, the default: the loss is the policy loss; 0.01 takes 0.01 x entropy from it."""
    for coefficient in (0.0, 0.01):
        seen = small(**({"actor_rollout_ref__actor__entropy_coeff": coefficient} if coefficient else {}))
        for line in seen.steps:
            assert line["actor/entropy"] > 0
            bonus = coefficient * line["actor/entropy"]
            assert line["actor/loss"] == pytest.approx(line["policy_loss"] - bonus, abs=1e-6 if bonus else 0)


def _roles(console: str) -> str:
    return next(line for line in console.splitlines() if line.startswith("Creating workers"))


def test_the_total_loss_exceeds_the_policy_loss_by_coefficient_times_kl(small):
    more = {MINI: 2, "actor_rollout_ref__actor__use_kl_loss": True, "actor_rollout_ref__model__dtype": "float64"}
    excess = {}
    for coefficient in (0.01, 0.1):
        seen = small(**more, actor_rollout_ref__actor__kl_loss_coef=coefficient)
        for line in seen.steps:
            difference = line["actor/loss"] - line["policy_loss"]
            assert line["kl_loss"] > 0
            assert difference == pytest.approx(coefficient * line["kl_loss"], rel=1e-6)
            assert line["actor/kl_term"] == pytest.approx(coefficient * line["kl_loss"])
        excess[coefficient] = seen.steps[0]["actor/loss"] - seen.steps[0]["policy_loss"]
    # The first mini-batch's KL has no gradient yet, so both runs meet the second with the same weights.
    assert excess[0.1] == pytest.approx(10 * excess[0.01], rel=1e-6)


def test_one_response_per_prompt_is_refused_before_a_model_is_loaded(tiny_model, parquet, tmp_path):
    wrong = settings(tiny_model / "nowhere", parquet, tmp_path / "out", actor_rollout_ref__rollout__n=1)
    with pytest.raises(ConfigError, match=r"rollout\.n=1` under `grpo`.*\n.*\n.*set .*rollout\.n to 2 or more"):
        posttrain.train(wrong, reward=parity_reward)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("n", [1, 3])
def test_gae_runs_with_one_response_per_prompt_and_with_several(small, n):
    seen = small(algorithm__adv_estimator="gae", actor_rollout_ref__rollout__n=n)
    assert len(seen.steps) == 2 and len(seen.samples()) == 4 * n


@pytest.mark.parametrize("installed", [False, True])
def test_an_engine_that_is_not_there_says_so_and_names_one_that_is(monkeypatch, four_rows, installed):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find("json" if installed else "nowhere_at_all"))
    installs = {"vllm": 'pip install "posttrain[vllm]"', "sglang": "pip install --no-deps sglang"}
    for name, install in installs.items():
        given = [f"{ROLLOUT}.name={name}", f"data.train_files={four_rows}"]
        if installed:
            assert load_config(given, environment=True).value(f"{ROLLOUT}.name") == name
        else:
            text = problems(*given)
            assert install in text and f"set {ROLLOUT}.name=native" in text


def test_a_parallel_size_that_does_not_divide_the_devices_is_an_error(four_rows):
    text = problems(f"{ROLLOUT}.tensor_model_parallel_size=2", f"data.train_files={four_rows}")
    assert "tensor_model_parallel_size=2` does not divide the 1 x 1 = 1 worker(s)" in text


def test_on_a_cpu_a_note_says_that_gpu_memory_utilization_has_no_effect(small):
    seen = small(actor_rollout_ref__rollout__gpu_memory_utilization=0.6, trainer__device="cpu")
    assert f"note: {ROLLOUT}.gpu_memory_utilization has no effect: the run is on the CPU." in seen.log.splitlines()


def truth_reward(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth)


def test_validation_metrics_are_those_of_the_validation_file(small, tmp_path):
    held_out = tmp_path / "held_out.json"
    held_out.write_text(
        json.dumps([{"prompt": f"q{x}", "ground_truth": str(x), "data_source": "mine"} for x in (1, 2, 6)])
    )
    seen = small(reward=truth_reward, data__val_files=str(held_out))
    assert [line["val/mine/mean@1"] for line in seen.lines if "val/mine/mean@1" in line] == [3.0, 3.0]
    assert "val/mine/mean@1" in seen.lines[0] and seen.lines[0]["step"] == 0


@pytest.mark.parametrize("size", [4, 6])
def test_a_step_has_that_many_uids_and_says_how_many_responses(small, size):
    seen = small(data__train_batch_size=size, **{MINI: 2})
    assert len(groups(seen.samples())) == len(groups(seen.samples(2))) == size
    assert len(seen.samples()) == size * 5
    assert f"each generates {size} prompts x 5 = {size * 5} responses" in seen.console


@pytest.mark.parametrize("limit", [30, 12])
def test_no_response_is_longer_and_one_at_the_limit_is_recorded(small, limit):
    seen = small(data__max_response_length=limit, data__train_batch_size=16)
    lengths = [len(row["response_ids"]) for row in seen.samples()]
    assert max(lengths) == limit and min(lengths) < limit
    cut = [row["finish_reason"] == "length" for row in seen.samples()]
    end = seen.trainer.tokenizer.eos_token_id
    assert cut == [len(row["response_ids"]) == limit and row["response_ids"][-1] != end for row in seen.samples()]
    assert seen.steps[0]["response_length/clip_ratio"] == sum(cut) / len(cut) < 1


@pytest.mark.parametrize("name", list(AdvantageEstimator))
def test_every_estimator_is_chosen_through_the_one_entry(main_ppo, brief_model, four_rows, name):
    more = ["data.max_prompt_length=64", "data.max_response_length=4", "trainer.total_training_steps=1"]
    more += [f"{MODEL}.path={brief_model}", f"data.train_files={four_rows}"]
    seen = main_ppo(f"algorithm.adv_estimator={name}", *more)
    assert seen.status == 0 and f"Using advantage estimator: {name}" in seen.log


def test_main_hands_its_configuration_to_run_ppo(monkeypatch):
    from posttrain.trainer.main_ppo import main, run_ppo

    given = []
    monkeypatch.setattr(entry, "run_ppo", given.append)
    main({"trainer": {"seed": 3}})
    monkeypatch.setattr(sys, "argv", ["main_ppo", "trainer.seed=3"])
    main()
    assert given[0] == {"trainer": {"seed": 3}}
    assert given[1].main_file == "posttrain/trainer/config/ppo_trainer.yaml" and given[1].config.trainer.seed == 3
    assert callable(run_ppo)


def test_four_keys_are_enough(main_ppo, brief_model, four_rows):
    keys = [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={four_rows}",
        f"{MODEL}.path={brief_model}",
        f"{ROLLOUT}.n=5",
    ]
    seen = main_ppo(*keys)
    assert seen.status == 0
    assert len(seen.steps) == 15 and len(seen.samples()) == 20  # 15 epochs of one batch
    assert "train_batch_size was not set; its default 1024 is lowered to the 4 prompts" in seen.log
    assert "No validation file is set" in seen.log


def test_model_and_tokenizer_come_from_the_folder_and_a_wrong_one_stops_the_run(
    grpo, small, tiny_model, parquet, tmp_path
):
    assert grpo.config["actor_rollout_ref"]["model"]["path"] == str(tiny_model)
    assert grpo.trainer.tokenizer.name_or_path == str(tiny_model)
    reference = grpo.trainer.actor_rollout_wg.worker.reference.engine.module.state_dict()
    from safetensors.torch import load_file

    stored = load_file(tiny_model / "model.safetensors")
    assert all(bool((reference[name] == tensor).all()) for name, tensor in stored.items()) and len(stored) > 10
    with pytest.raises(ConfigError, match=r"model\.path`: the folder /nowhere/m does not exist"):
        posttrain.train(settings(Path("/nowhere/m"), parquet, tmp_path / "a"), reward=parity_reward)
    with pytest.raises(ConfigError, match=r"org/no-such-model is neither a folder here nor a model in the hub's cache"):
        posttrain.train(settings(Path("org/no-such-model"), parquet, tmp_path / "b"), reward=parity_reward)


def test_gsm8k_files_under_home_are_read_and_absent_ones_name_their_command(main_ppo, brief_model, tmp_path, parquet):
    home = tmp_path / "home"
    train, test = home / "data/gsm8k/train.parquet", home / "data/gsm8k/test.parquet"
    keys = [f"data.train_files={train}", f"data.val_files={test}"]
    text = problems(*keys)
    assert f"the file {train} does not exist" in text and f"posttrain data gsm8k --out {train.parent}" in text
    train.parent.mkdir(parents=True)
    shutil.copy(parquet["train"], train)
    shutil.copy(parquet["test"], test)
    more = ["data.max_prompt_length=32", "data.max_response_length=4", "trainer.total_training_steps=1"]
    more += [f"{MODEL}.path={brief_model}", "algorithm.adv_estimator=grpo", "data.train_batch_size=4"]
    with chdir(tmp_path, HOME=str(home)):
        seen = main_ppo(*keys, *more)
    assert seen.status == 0 and "val/math_reasoning/mean@1" in seen.lines[0]


def test_the_logged_learning_rate_is_the_number_given(main_ppo, small, brief_model, four_rows, tmp_path):
    warm = small(
        actor_rollout_ref__actor__optim__lr=1e-6,
        actor_rollout_ref__actor__optim__lr_warmup_steps=2,
        trainer__total_training_steps=3,
    )
    assert [line["actor/lr"] for line in warm.steps] == pytest.approx([5e-7, 1e-6, 1e-6])
    (tmp_path / "rate.yaml").write_text("actor_rollout_ref:\n  actor:\n    optim: {lr: 1e-6}\n")
    more = ["data.max_prompt_length=64", "data.max_response_length=4", "trainer.total_training_steps=1"]
    more += [f"{MODEL}.path={brief_model}", f"data.train_files={four_rows}", "algorithm.adv_estimator=grpo"]
    from_file = main_ppo("--config-path=.", "--config-name=rate", *more)
    from_line = main_ppo(f"{ACTOR}.optim.lr=1e-6", *more)
    assert from_file.steps[0]["actor/lr"] == from_line.steps[0]["actor/lr"] == 1e-6


def test_one_worker_on_one_node_and_more_than_there_are_is_an_error(grpo, four_rows):
    assert grpo.trainer.actor_rollout_wg.world_size == 1
    assert (grpo.config["trainer"]["n_gpus_per_node"], grpo.config["trainer"]["nnodes"]) == (1, 1)
    text = problems("trainer.n_gpus_per_node=4096", "trainer.device=cpu", f"data.train_files={four_rows}")
    assert "asks for 4096 workers; this machine has" in text


def test_steps_are_epochs_times_batches_per_epoch(small):
    seen = small(data__train_max_samples=10, trainer__total_epochs=3, trainer__total_training_steps=None)
    assert [line["step"] for line in seen.steps] == [1, 2, 3, 4, 5, 6]  # 10 rows are two batches of 4
    first_epoch = {row["prompt"] for step in (1, 2) for row in seen.samples(step)}
    assert len(first_epoch) == 8


def test_project_and_experiment_name_the_run_directory_and_the_loggers_run(small, monkeypatch):
    started = {}
    wandb = types.ModuleType("wandb")
    run = types.SimpleNamespace(log=lambda metrics, step: None, finish=lambda: None)
    wandb.init = lambda **named: started.update(named) or run  # type: ignore[attr-defined]
    wandb.Settings = lambda **named: named  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    names = {"trainer__project_name": "verl_grpo_example", "trainer__experiment_name": "qwen3_8b_grpo"}
    seen = small(**names, trainer__logger=["console", "wandb"])
    assert seen.path.parts[-2:] == ("verl_grpo_example", "qwen3_8b_grpo")
    assert (started["project"], started["name"]) == ("verl_grpo_example", "qwen3_8b_grpo")
    assert started["config"]["algorithm"]["adv_estimator"] == "grpo"


def test_several_nodes_without_a_cluster_say_how_to_give_one(four_rows):
    text = problems("trainer.nnodes=4", "trainer.n_gpus_per_node=8", f"data.train_files={four_rows}")
    assert "`trainer.nnodes=4` asks for 4 machines" in text
    assert all(form in text for form in ("Ray cluster", "torchrun", "RAY_HEAD_ADDRESS=HOST:6379"))


def test_in_a_run_the_command_line_wins_over_the_file(main_ppo, tmp_path, brief_model, four_rows):
    (tmp_path / "my_grpo_config.yaml").write_text(
        "algorithm: {adv_estimator: grpo}\n"
        f"actor_rollout_ref: {{model: {{path: {brief_model}}}, rollout: {{n: 3}}}}\n"
        "data: {train_files: other.json, max_prompt_length: 64, max_response_length: 4}\n"
        "trainer: {total_training_steps: 1}\n"
    )
    seen = main_ppo("--config-path=.", "--config-name=my_grpo_config", f"data.train_files={four_rows}")
    assert seen.status == 0 and seen.config["data"]["train_files"] == str(four_rows)
    assert len(seen.samples()) == 4 * 3
