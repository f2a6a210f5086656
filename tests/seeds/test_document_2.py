"""Document 2, the rows of its tables: what each setting changes, by the numbers of small runs.

The formulas alone are tested in tests/algorithms, spellings and defaults in tests/config.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from statistics import fmean

import numpy as np
import pytest
import torch
from seen import ROOT, groups

from posttrain.algorithms.registry import ADV_ESTIMATORS
from posttrain.config import load_config
from posttrain.trainer.ppo import ray_trainer
from posttrain.trainer.ppo.ray_trainer import compute_advantage

ACTOR, N = "actor_rollout_ref__actor__", "actor_rollout_ref__rollout__n"
MINI, EPOCHS = f"{ACTOR}ppo_mini_batch_size", f"{ACTOR}ppo_epochs"
SHORT = ["data.max_prompt_length=64", "data.max_response_length=4", "trainer.total_training_steps=1"]


def uneven(brief_model) -> dict:
    """Settings of a run whose responses differ in length, with one update per step."""
    return {"actor_rollout_ref__model__path": str(brief_model), "data__max_response_length": 12}


# -- definition and key components


def test_each_of_the_four_steps_is_one_stage_of_the_loop_and_one_timing(grpo):
    source = inspect.getsource(ray_trainer.RayPPOTrainer)
    for stage in ("gen", "reward", "adv", "update_actor"):  # sampling, reward, baseline, update
        assert len(re.findall(rf'stage\("{stage}"\)', source)) == 1
        assert all(line[f"timing_s/{stage}"] > 0 for line in grpo.steps)


def test_a_step_of_grpo_has_no_value_stage_and_one_of_gae_has(grpo, gae):
    value_stages = {"timing_s/values", "timing_s/update_critic"}
    assert all(not value_stages & set(line) for line in grpo.steps)
    assert all(value_stages <= set(line) for line in gae.steps)


def test_each_uid_has_n_samples_that_are_not_all_equal(grpo):
    assert grpo.config["actor_rollout_ref"]["rollout"]["temperature"] == 1.0
    for step in (1, 2):
        for rows in groups(grpo.samples(step)).values():
            assert len(rows) == 5 and len({tuple(row["response_ids"]) for row in rows}) > 1


def test_a_constant_added_to_the_rewards_of_a_group_changes_no_advantage(grpo):
    batch = grpo.trainer.batches[0]
    names = sorted(set(batch.non_tensor_batch["uid"]))
    shift = torch.tensor([7.0 * names.index(uid) - 3 for uid in batch.non_tensor_batch["uid"]])
    shifted = batch[list(range(len(batch)))]
    last = batch.batch["response_mask"].sum(-1) - 1
    rewards = batch.batch["token_level_rewards"].clone()
    rewards[torch.arange(len(batch)), last] += shift
    shifted.batch["token_level_rewards"] = rewards
    plain = batch.batch["advantages"].clone()
    compute_advantage(shifted, "grpo")
    assert plain.abs().max() > 0.5 and shift.unique().numel() == 4
    torch.testing.assert_close(shifted.batch["advantages"], plain, atol=1e-4, rtol=1e-4)


# -- the table of parameters


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gae"])
def test_mini_batches_and_passes_act_the_same_under_every_estimator(small, estimator):
    once = small(algorithm__adv_estimator=estimator, **{MINI: 2})
    twice = small(algorithm__adv_estimator=estimator, **{MINI: 2, EPOCHS: 2})
    assert (once.updates, twice.updates) == (4, 8)  # in two steps of 4 prompts
    assert [line["actor/optimizer_steps"] for line in twice.steps] == [4, 4]


def test_a_run_with_the_documents_spelling_of_n(main_ppo, brief_model, four_rows):
    keys = ["algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={brief_model}"]
    seen = main_ppo(*keys, f"data.train_files={four_rows}", "actor_rollout.ref.rollout.n=3", *SHORT)
    assert seen.status == 0 and set(map(len, groups(seen.samples()).values())) == {3}
    note = next(line for line in seen.log.splitlines() if "actor_rollout.ref.rollout.n" in line)
    assert "actor_rollout_ref.rollout.n" in note


@pytest.mark.parametrize("size", [4, 8])
def test_the_batch_size_is_the_number_of_prompts_and_times_n_that_of_responses(small, size):
    seen = small(data__train_batch_size=size, **{MINI: 2, N: 3})
    for step in (1, 2):
        assert Counter(map(len, groups(seen.samples(step)).values())) == {3: size}


def test_the_mini_batch_counts_prompts_not_responses(small):
    for n in (2, 3):
        seen = small(data__train_batch_size=8, **{MINI: 4, N: n})
        assert [line["actor/optimizer_steps"] for line in seen.steps] == [2, 2]


def test_the_clip_range_is_0_2_unless_set_and_decides_what_is_clipped(small):
    more = {MINI: 2, EPOCHS: 2, f"{ACTOR}optim__lr": 3e-3, "trainer__total_training_steps": 1}
    unset, same = small(**more), small(**more, **{f"{ACTOR}clip_ratio": 0.2})
    narrow, wide = small(**more, **{f"{ACTOR}clip_ratio": 0.02}), small(**more, **{f"{ACTOR}clip_ratio": 0.99})
    share = [seen.steps[0]["actor/pg_clipfrac"] for seen in (unset, same, narrow, wide)]
    assert share[0] == share[1] and share[2] > share[0] > share[3]
    assert unset.steps[0]["actor/grad_norm"] == same.steps[0]["actor/grad_norm"] != narrow.steps[0]["actor/grad_norm"]


def test_the_upper_side_of_the_clip_alone_can_be_wider(small):
    more = {MINI: 2, EPOCHS: 2, f"{ACTOR}optim__lr": 3e-3, "trainer__total_training_steps": 1}
    sides = {f"{ACTOR}clip_ratio_low": 0.02, f"{ACTOR}clip_ratio_high": 0.02}
    both, higher = small(**more, **sides), small(**more, **(sides | {f"{ACTOR}clip_ratio_high": 0.3}))
    assert both.steps[0]["actor/pg_clipfrac"] > higher.steps[0]["actor/pg_clipfrac"] > 0


def test_unset_the_estimator_is_gae_and_the_log_says_which(main_ppo, brief_model, four_rows, grpo):
    seen = main_ppo(f"actor_rollout_ref.model.path={brief_model}", f"data.train_files={four_rows}", *SHORT)
    assert seen.log.splitlines().count("Using advantage estimator: gae") == 1
    assert set(map(len, groups(seen.samples()).values())) == {1} and "critic/vf_loss" in seen.steps[0]
    assert grpo.log.splitlines().count("Using advantage estimator: grpo") == 1


def aggregated(rows: list[dict], mode: str, constant: float) -> float:
    """Minus the advantages of these samples as one number: the loss of the first update, where every ratio is 1."""
    losses = [[-value for value in row["advantages"]] for row in rows]
    sums, lengths = [math.fsum(row) for row in losses], [len(row) for row in losses]
    return {
        "token-mean": math.fsum(sums) / sum(lengths),
        "token-sum": math.fsum(sums),
        "seq-mean-token-sum": fmean(sums),
        "seq-mean-token-mean": fmean(total / length for total, length in zip(sums, lengths, strict=True)),
        "seq-mean-token-sum-norm": fmean(total / constant for total in sums),
    }[mode]


MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_of_a_run_is_that_of_its_aggregation_mode(small, brief_model, mode):
    given = {} if mode == "token-mean" else {f"{ACTOR}loss_agg_mode": mode}  # the first is what an unset key means
    seen = small(**uneven(brief_model), **given)
    rows = seen.samples()
    assert len({len(row["advantages"]) for row in rows}) > 3
    expected = {name: aggregated(rows, name, constant=12) for name in MODES}
    assert seen.steps[0]["policy_loss"] == pytest.approx(expected[mode], rel=1e-4, abs=1e-6)
    others = [value for name, value in expected.items() if name != mode]
    assert all(abs(value - expected[mode]) > 1e-3 for value in others)


def test_every_grpo_example_leaves_the_aggregation_as_it_is():
    scripts = sorted((ROOT / "examples" / "grpo_trainer").glob("*.sh"))
    assert scripts and all("loss_agg_mode" not in script.read_text() for script in scripts)
    assert load_config(["algorithm=grpo"]).value("actor_rollout_ref.actor.loss_agg_mode") == "token-mean"


def test_the_kl_loss_brings_a_reference_and_puts_nothing_into_the_reward(small, grpo):
    without = small()
    assert without.trainer.actor_rollout_wg.worker.reference.engine is None
    assert grpo.trainer.actor_rollout_wg.worker.reference.engine is not None
    for batch in grpo.trainer.batches:
        assert torch.equal(batch.batch["token_level_rewards"], batch.batch["token_level_scores"])
    assert all("actor/reward_kl_penalty" not in line for line in grpo.steps)


def test_the_coefficient_is_0_001_unless_set(grpo, small):
    ten = small(**{f"{ACTOR}use_kl_loss": True, f"{ACTOR}kl_loss_coef": 0.01, MINI: 2})
    for seen, coefficient in ((grpo, 0.001), (ten, 0.01)):
        assert seen.config["actor_rollout_ref"]["actor"]["kl_loss_coef"] == coefficient
        for line in seen.steps:
            assert line["kl_loss"] > 0 and line["actor/kl_term"] == pytest.approx(coefficient * line["kl_loss"])


KL = {
    "kl": lambda d: d,
    "abs": abs,
    "mse": lambda d: d * d / 2,
    "low_var_kl": lambda d: math.exp(-d) + d - 1,
}


@pytest.mark.parametrize(
    ("kind", "formula"), [*((name, name) for name in KL), ("k1", "kl"), ("k1+", "kl"), ("k3+", "low_var_kl")]
)
def test_the_kl_loss_of_a_run_is_that_of_its_type(small, kind, formula):
    """With one update per step the policy of the update is the one that sampled, whose log-probs are recorded."""
    more = {f"{ACTOR}use_kl_loss": True, f"{ACTOR}kl_loss_type": kind, f"{ACTOR}old_log_probs": "trainer"}
    seen = small(**more, **{f"{ACTOR}optim__lr": 1e-2}, actor_rollout_ref__model__dtype="float64")
    gaps = [
        ours - theirs
        for row in seen.samples(2)
        for ours, theirs in zip(row["old_log_probs"], row["ref_log_probs"], strict=True)
    ]
    expected = {name: fmean(map(value, gaps)) for name, value in KL.items()}
    assert seen.steps[1]["kl_loss"] == pytest.approx(expected[formula], rel=1e-4, abs=1e-9)
    assert all(abs(expected[formula] / value - 1) > 0.01 for name, value in expected.items() if name != formula)


# -- DrGRPO


def test_the_mean_length_of_right_and_of_wrong_answers_is_a_metric_of_a_run(small, brief_model):
    seen = small(**uneven(brief_model))
    rows = seen.samples()
    for name, wanted in (("right", True), ("wrong", False)):
        lengths = [len(row["response_ids"]) for row in rows if (row["score"] >= 0.5) is wanted]
        assert len(lengths) > 2 and seen.steps[0][f"response_length/{name}/mean"] == pytest.approx(fmean(lengths))


def test_one_constant_divides_all_rows_and_it_is_a_setting(small, brief_model):
    given = {f"{ACTOR}loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}loss_scale_factor": 5}
    seen = small(**uneven(brief_model), **given)
    expected = aggregated(seen.samples(), "seq-mean-token-sum-norm", constant=5)
    assert seen.steps[0]["policy_loss"] == pytest.approx(expected, rel=1e-4)


def test_without_the_kl_loss_no_reference_is_loaded_and_no_term_stands_in_the_loss(small):
    seen = small(**{f"{ACTOR}use_kl_loss": False, f"{ACTOR}loss_agg_mode": "seq-mean-token-sum-norm"})
    assert seen.trainer.actor_rollout_wg.worker.reference.engine is None
    assert all("ref_log_prob" not in batch.batch for batch in seen.trainer.batches)
    for line in seen.steps:
        assert "kl_loss" not in line and line["actor/loss"] == line["policy_loss"]


def test_without_the_division_advantages_are_the_distance_from_the_group_mean(small):
    rewards = torch.zeros(5, 2, dtype=torch.float64)
    rewards[0, 1] = 1.0
    given = {"token_level_rewards": rewards, "response_mask": torch.ones(5, 2), "index": np.array(["a"] * 5)}
    advantages, _ = ADV_ESTIMATORS["grpo"](**given, config={"norm_adv_by_std_in_grpo": False})
    assert advantages[:, 0].tolist() == pytest.approx([0.8, -0.2, -0.2, -0.2, -0.2])
    for rows in groups(small(algorithm__norm_adv_by_std_in_grpo=False).samples()).values():
        mean = fmean(row["score"] for row in rows)
        assert [row["advantages"][0] for row in rows] == pytest.approx([row["score"] - mean for row in rows], abs=1e-6)
