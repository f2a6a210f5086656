"""Every estimator, every policy loss and every preset trains a tiny model: finite numbers, weights that moved."""

import json
import math
from itertools import zip_longest

import light_rewards
import pyarrow.parquet as pq
import pytest
import torch
from light_rewards import even_share, in_parts
from runs import metrics_of, run, settings

import posttrain
from posttrain.algorithms.registry import ADV_ESTIMATORS, POLICY_LOSSES
from posttrain.config.choices import PRESETS
from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer

pytestmark = pytest.mark.slow
ACTOR = "actor_rollout_ref__actor__"
# Every registered estimator with some loss and every registered loss with some estimator.
PAIRS = list(zip_longest(ADV_ESTIMATORS, POLICY_LOSSES, fillvalue=None))
FIVE_STEPS = {
    f"{ACTOR}ppo_mini_batch_size": 2,
    "trainer__total_training_steps": 5,
    "trainer__save_freq": -1,
    "tracking__samples_freq": 0,
}
LORA = {"actor_rollout_ref__model__lora_rank": 4, "actor_rollout_ref__model__lora_alpha": 8}


@pytest.fixture
def seen(monkeypatch):
    """The trainer of a run, with its weights as they were before the first step."""
    caught = {}
    plain = RayPPOTrainer.init_workers

    def init_workers(self):
        plain(self)
        caught["trainer"] = self
        caught["before"] = weights(self)

    monkeypatch.setattr(RayPPOTrainer, "init_workers", init_workers)
    return caught


def weights(trainer):
    """The weights that are trained, by name."""
    module = trainer.actor_rollout_wg.worker.engine.module
    return {name: w.detach().clone() for name, w in module.named_parameters() if w.requires_grad}


def assert_five_sound_steps(result, seen):
    """Five steps of two updates each, every number finite, weights that moved; gives the lines of the metrics."""
    lines = metrics_of(result.path)
    assert result.status == "finished" and result.steps == len(lines) == 5
    assert all(math.isfinite(v) for line in lines for v in line.values() if isinstance(v, int | float))
    assert all(line["actor/optimizer_steps"] == 2 and line["actor/bad_steps"] == 0 for line in lines)
    after = weights(seen["trainer"])
    assert any(not torch.equal(after[name], before) for name, before in seen["before"].items())
    return lines


@pytest.mark.parametrize(("estimator", "loss"), PAIRS)
def test_every_estimator_and_every_loss_runs_five_steps(tiny_model, sums, tmp_path, seen, estimator, loss):
    chosen = {"algorithm__adv_estimator": estimator or "grpo", f"{ACTOR}policy_loss__loss_mode": loss or "vanilla"}
    lines = assert_five_sound_steps(run(tiny_model, sums, tmp_path, reward=in_parts, **chosen, **FIVE_STEPS), seen)
    assert (seen["trainer"].critic_wg is not None) == (estimator == "gae")
    assert all(("critic/vf_loss" in line) == (estimator == "gae") for line in lines)
    assert all(("remax/baseline_mean" in line) == (estimator == "remax") for line in lines)


def test_codapo_repeats_prompts_of_every_other_step(tiny_model, sums, tmp_path):
    more = {"algorithm__codapo_top_k": 1, "trainer__total_training_steps": 4, "actor_rollout_ref__rollout__n": 6}
    result = run(tiny_model, sums, tmp_path, reward=even_share, algorithm__adv_estimator="codapo", **more)
    assert [line["prompts/repeated"] for line in metrics_of(result.path)] == [0.0, 1.0, 0.0, 1.0]
    steps = [pq.read_table(result.path / "samples" / f"step_{step}.parquet").to_pylist() for step in range(1, 5)]
    prompts = [[row["prompt"] for row in rows] for rows in steps]
    groups = [len({row["uid"] for row in rows}) for rows in steps]
    assert [len(set(names)) for names in prompts] == [4, 1, 4, 1] and groups == [4, 4, 4, 4]
    assert prompts[1][0] in prompts[0] and prompts[3][0] in prompts[2]


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_adapters_run_five_steps_and_they_alone_move(tiny_model, sums, tmp_path, seen, estimator):
    more = {"algorithm__adv_estimator": estimator, f"{ACTOR}use_kl_loss": True, **LORA, **FIVE_STEPS}
    lines = assert_five_sound_steps(run(tiny_model, sums, tmp_path, reward=even_share, **more), seen)
    assert seen["before"] and all("lora_" in name for name in seen["before"])
    assert lines[-1]["kl_loss"] > 0  # against the base without them


# What a preset needs beside itself for an untrained model and a reward that is one number.
BESIDE = {"dapo": {"algorithm__filter_groups__metric": "score", "actor_rollout_ref__rollout__n": 4}}
SHOWN = {
    "grpo": ("kl_loss",),
    "dapo": ("filter_groups/gen_batches", "reward/overlong_reward/mean"),
    "remax": ("remax/baseline_mean", "actor/reward_kl_penalty"),
    "ppo": ("critic/vf_loss", "actor/reward_kl_penalty"),
    "rloo": ("actor/reward_kl_penalty",),
    "reinforce_pp": ("actor/reward_kl_penalty",),
}


@pytest.mark.parametrize("name", [name.partition("/")[2] for name in PRESETS if name.startswith("algorithm/")])
def test_every_preset_runs(tiny_model, sums, tmp_path, seen, name):
    beside = BESIDE.get(name, {})
    given = settings(tiny_model, sums, tmp_path, **FIVE_STEPS, **beside)
    del given["algorithm.adv_estimator"]
    if "actor_rollout_ref__rollout__n" not in beside:
        del given["actor_rollout_ref.rollout.n"]
    result = posttrain.train({"algorithm": name, **given}, reward=even_share)
    lines = assert_five_sound_steps(result, seen)
    assert all(metric in line for line in lines for metric in SHOWN.get(name, ()))


def test_drgrpo_by_its_three_settings_equals_the_preset(tiny_model, sums, tmp_path):
    three = {
        "algorithm__norm_adv_by_std_in_grpo": False,
        f"{ACTOR}loss_agg_mode": "seq-mean-token-sum-norm",
        f"{ACTOR}use_kl_loss": False,
    }
    by_hand = run(tiny_model, sums, tmp_path / "a", reward=even_share, **three)
    by_preset = posttrain.train(
        {"algorithm": "drgrpo", **settings(tiny_model, sums, tmp_path / "b")}, reward=even_share
    )
    assert metrics_of(by_hand.path) == metrics_of(by_preset.path)


def test_the_rollout_correction_runs_and_reports(tiny_model, sums, tmp_path):
    more = {
        "algorithm__rollout_correction__rollout_is": "token",
        "algorithm__rollout_correction__rollout_is_threshold": "0.5_5.0",
        "algorithm__rollout_correction__rollout_rs": "token_k1,seq_mean_k3",
        "algorithm__rollout_correction__rollout_rs_threshold": "0.5_2.0,0.01",
    }
    line = metrics_of(run(tiny_model, sums, tmp_path, reward=even_share, **more).path)[-1]
    assert line["rollout_is/ess"] == pytest.approx(1, abs=1e-5) and line["mismatch/ppl_ratio"] == pytest.approx(
        1, abs=1e-5
    )
    assert line["rollout_is/masked"] == line["rollout_rs/rejected"] == 0.0
    # One update on a batch: the update has the log-probs that both are made from.
    assert "timing_s/old_log_prob" not in metrics_of(tmp_path / "test" / "run", times=True)[-1]


IS, RS = "algorithm__rollout_correction__rollout_is", "algorithm__rollout_correction__rollout_rs"
BYPASS = {
    "clip": ({IS: "token"}, "rollout_is/truncated"),
    "clip, rejection": ({RS: "seq_mean_k3", f"{RS}_threshold": 0.01}, "rollout_rs/rejected_rows"),
    "reinforce": ({IS: "sequence", f"{ACTOR}policy_loss__loss_mode": "gpg"}, "rollout_is/ess"),
    "reinforce of mean 1, rejection": (
        {
            IS: "token",
            f"{IS}_threshold": "0.5_1.0",
            f"{IS}_batch_normalize": True,
            RS: "token_k1",
            f"{RS}_threshold": 1.5,
            f"{ACTOR}policy_loss__loss_mode": "gpg",
        },
        "rollout_is/norm",
    ),
}


@pytest.mark.parametrize("form", BYPASS)
def test_bypass_mode_runs_two_steps_and_reports(tiny_model, sums, tmp_path, form):
    settings, metric = BYPASS[form]
    two = {f"{ACTOR}ppo_mini_batch_size": 2, f"{ACTOR}optim__lr": 1e-2, f"{ACTOR}old_log_probs": "rollout"}
    lines = metrics_of(run(tiny_model, sums, tmp_path / "a", reward=even_share, **two, **settings).path)
    assert len(lines) == 2 and all(line["actor/optimizer_steps"] == 2 for line in lines)
    assert all(math.isfinite(line[metric]) and line["mismatch/ppl_ratio"] > 0 for line in lines)
    off = {key: value for key, value in settings.items() if "correction" not in key}
    plain = metrics_of(run(tiny_model, sums, tmp_path / "b", reward=even_share, **two, **off).path)
    # The second update of the first step is off-policy. In the clipped loss its ratio corrects for that already.
    assert (plain[0]["actor/grad_norm"] == lines[0]["actor/grad_norm"]) == (form == "clip")


def test_sum_pi_squared_is_that_of_the_full_distribution(tiny_model, sums, tmp_path, seen, monkeypatch):
    batches = []
    plain = RayPPOTrainer._update
    monkeypatch.setattr(
        RayPPOTrainer, "_update", lambda self, batch, step: batches.append(batch) or plain(self, batch, step)
    )
    more = {"trainer__total_training_steps": 1, "actor_rollout_ref__rollout__temperature": 0.8}
    run(tiny_model, sums, tmp_path, reward=even_share, **more)
    worker, batch = seen["trainer"].actor_rollout_wg.worker, batches[0]
    ours = worker.compute_sum_pi_squared(batch).batch["sum_pi_squared"]
    for row in range(len(batch)):
        mask = batch.batch["attention_mask"][row].bool()
        ids = batch.batch["input_ids"][row][mask]
        length = int(batch.batch["attention_mask"][row, -ours.shape[1] :].sum())
        with torch.no_grad():
            probs = (worker.engine.module(ids[None]).logits[0].double() / 0.8).softmax(-1)
        expected = (probs**2).sum(-1)[:-1][-length:]
        torch.testing.assert_close(ours[row, :length].double(), expected, rtol=1e-4, atol=1e-7)


def test_a_gdpo_run_learns_from_its_functions_by_their_signs(tiny_model, sums, tmp_path):
    """One function, a penalty: the higher its score within a group, the lower the advantage."""
    functions = {"even": {"path": light_rewards.__file__, "name": "in_parts", "weight": -1.0}}
    result = run(
        tiny_model,
        sums,
        tmp_path,
        reward=None,
        algorithm__adv_estimator="gdpo",
        reward__functions=functions,
        trainer__total_training_steps=1,
    )
    rows = pq.read_table(result.path / "samples" / "step_1.parquet").to_pylist()
    pairs = [
        (json.loads(one["reward_parts"])["even"] - json.loads(two["reward_parts"])["even"], one, two)
        for one in rows
        for two in rows
        if one["uid"] == two["uid"]
    ]
    differing = [(gap, one["advantages"][0] - two["advantages"][0]) for gap, one, two in pairs if gap]
    assert differing and all(gap * difference < 0 for gap, difference in differing)


@pytest.mark.parametrize("corrected", [False, True])
def test_filters_are_seen_by_the_correction_and_named_at_step_0(tiny_model, sums, tmp_path, capsys, corrected):
    more = {"actor_rollout_ref__rollout__top_k": 3, "trainer__total_training_steps": 1}
    if corrected:
        more |= {"algorithm__rollout_correction__rollout_is": "token"}
    line = metrics_of(run(tiny_model, sums, tmp_path, **more).path)[0]
    said = capsys.readouterr().out
    assert line["mismatch/sampling_kl"] > 1.0  # 3 of 259 tokens of an untrained model: about log(259 / 3)
    assert line["mismatch/logp_max"] < 1e-4  # the engines agree all the same
    assert "To what was really sampled from the policy's ratio is 0.0" in said
    assert ("algorithm.rollout_correction corrects for it" in said) == corrected
    assert ("nothing corrects for it" in said) != corrected
    if corrected:
        assert line["rollout_is/max"] < 0.1 and line["mismatch/kl"] == pytest.approx(line["mismatch/sampling_kl"], 1e-3)
