"""Every metric against its plain formula."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch

from posttrain.tracking.metrics import step_metrics

REWARDS = [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.25, 0.75, 0.5]]
LENGTHS = [[3, 5, 2], [4, 1, 6], [2, 2, 2], [6, 3, 1]]
FLAT, FLAT_LENGTHS = [r for group in REWARDS for r in group], [n for group in LENGTHS for n in group]
ROWS, PROMPT, WIDTH = 12, 4, 6


def batch(dtype: torch.dtype = torch.float32) -> dict:
    mask = torch.zeros(ROWS, WIDTH, dtype=torch.long)
    scores, advantages = torch.zeros(ROWS, WIDTH, dtype=dtype), torch.full((ROWS, WIDTH), 99.0)
    for row, (length, reward) in enumerate(zip(FLAT_LENGTHS, FLAT, strict=True)):
        mask[row, :length] = 1
        scores[row, length - 1] = reward
        advantages[row, :length] = reward - 0.5
    prompt_mask = torch.ones(ROWS, PROMPT, dtype=torch.long)
    prompt_mask[::3, :2] = 0
    return {
        "response_mask": mask,
        "responses": mask * 7,
        "token_level_scores": scores,
        "token_level_rewards": scores - 0.01 * mask,
        "advantages": advantages,
        "attention_mask": torch.cat([prompt_mask, mask], dim=1),
        "uid": np.array([f"g{row // 3}" for row in range(ROWS)], dtype=object),
        "data_source": np.array(["sums"] * 6 + ["openai/gsm8k"] * 6, dtype=object),
    }


def test_reward_mean_is_the_mean_of_the_rewards():
    assert step_metrics(batch())["reward_mean"] == math.fsum(FLAT) / 12


def test_reward_std_is_the_mean_over_groups_of_the_sample_deviation():
    expected = statistics.fmean(statistics.stdev(group) for group in REWARDS)
    assert step_metrics(batch())["reward_std"] == pytest.approx(expected, abs=1e-15)


def test_reward_std_follows_uid_not_the_order_of_rows():
    order = torch.tensor([5, 0, 11, 3, 7, 1, 9, 2, 10, 4, 8, 6])
    shuffled = {
        name: column[order.numpy()] if isinstance(column, np.ndarray) else column[order]
        for name, column in batch().items()
    }
    assert step_metrics(shuffled) == step_metrics(batch())


def test_losses_are_means_over_mini_batches_under_their_plain_names():
    update = {"actor/policy_loss": [0.1, 0.2, 0.6], "actor/kl_loss": 0.03, "actor/grad_norm": [1.0, 3.0]}
    metrics = step_metrics(batch(), update=update)
    assert metrics["policy_loss"] == pytest.approx(0.3, abs=1e-15)
    assert metrics["kl_loss"] == 0.03 and metrics["actor/grad_norm"] == 2.0
    assert "kl_loss" not in step_metrics(batch(), update={"actor/pg_loss": 0.5})
    assert step_metrics(batch(), update={"actor/pg_loss": 0.5})["policy_loss"] == 0.5


def test_response_length_is_the_mean_number_of_response_tokens():
    metrics = step_metrics(batch())
    assert metrics["response_length"] == metrics["response_length/mean"] == sum(FLAT_LENGTHS) / 12
    assert (metrics["response_length/max"], metrics["response_length/min"]) == (6, 1)


def test_length_of_right_and_of_wrong_answers():
    metrics = step_metrics(batch())
    right = [length for length, reward in zip(FLAT_LENGTHS, FLAT, strict=True) if reward >= 0.5]
    wrong = [length for length, reward in zip(FLAT_LENGTHS, FLAT, strict=True) if reward < 0.5]
    assert metrics["response_length/right/mean"] == pytest.approx(statistics.fmean(right))
    assert metrics["response_length/wrong/mean"] == pytest.approx(statistics.fmean(wrong))
    all_right = batch() | {"token_level_scores": torch.ones(ROWS, WIDTH)}
    assert "response_length/wrong/mean" not in step_metrics(all_right)


def test_groups_without_signal_all_right_and_all_wrong():
    metrics = step_metrics(batch())
    assert metrics["groups/no_signal"] == 2 / 4
    assert metrics["groups/all_right"] == 1 / 4 and metrics["groups/all_wrong"] == 1 / 4
    means = [statistics.fmean(group) for group in REWARDS]
    assert metrics["groups/reward_mean/max"] == 1.0 and metrics["groups/reward_mean/min"] == 0.0
    assert metrics["groups/reward_mean/std"] == pytest.approx(statistics.stdev(means))


def test_groups_of_one_have_no_deviation_and_claim_no_missing_signal():
    metrics = step_metrics(batch() | {"uid": np.arange(ROWS)})
    assert metrics["reward_std"] == 0.0 and "groups/no_signal" not in metrics


def test_advantages_are_taken_over_response_tokens_only():
    metrics = step_metrics(batch())
    tokens = [reward - 0.5 for length, reward in zip(FLAT_LENGTHS, FLAT, strict=True) for _ in range(length)]
    assert metrics["critic/advantages/mean"] == pytest.approx(statistics.fmean(tokens), abs=1e-12)
    assert (metrics["critic/advantages/max"], metrics["critic/advantages/min"]) == (0.5, -0.5)


def test_rewards_after_the_kl_penalty_are_told_from_scores():
    metrics = step_metrics(batch(torch.float64))
    expected = (sum(FLAT) - 0.01 * sum(FLAT_LENGTHS)) / 12
    assert metrics["critic/rewards/mean"] == pytest.approx(expected, abs=1e-9)
    assert metrics["critic/score/mean"] == metrics["reward_mean"]
    assert (metrics["critic/score/max"], metrics["critic/score/min"]) == (1.0, 0.0)


def test_rewards_by_data_source():
    metrics = step_metrics(batch())
    assert metrics["data_source/sums/reward_mean"] == pytest.approx(2 / 6)
    assert metrics["data_source/openai/gsm8k/reward_mean"] == pytest.approx(4.5 / 6)


def test_reward_parts_failures_and_correctness_by_part():
    parts = np.array(
        [{"acc": float(row == 0), "format": 0.5, "pred": "7"} for row in range(ROWS - 1)] + [{}], dtype=object
    )
    errors = np.array([None] * 9 + ["ValueError"] * 3, dtype=object)
    metrics = step_metrics(batch() | {"reward_parts": parts, "reward_error": errors})
    assert metrics["reward/acc/mean"] == pytest.approx(1 / 11) and metrics["reward/format/mean"] == 0.5
    assert metrics["reward/failures"] == 3.0 and "reward/pred/mean" not in metrics
    assert metrics["right/mean"] == pytest.approx(2 / 12)  # row 0 by `acc`; the last row has no parts and scored 0.5


def test_prompt_length_and_cut_off_responses():
    metrics = step_metrics(batch(), max_response_length=6)
    assert metrics["prompt_length/mean"] == pytest.approx((4 * 2 + 8 * 4) / 12) and metrics["prompt_length/max"] == 4
    assert metrics["response_length/clip_ratio"] == pytest.approx(2 / 12)
    reasons = np.array(["length"] * 3 + ["stop"] * 9, dtype=object)
    assert step_metrics(batch() | {"finish_reason": reasons})["response_length/clip_ratio"] == 0.25


def test_timing_and_throughput():
    tokens = sum(FLAT_LENGTHS) + 4 * 2 + 8 * 4
    metrics = step_metrics(batch(), timing={"gen": 2.0, "update_actor": 1.0, "step": 4.0}, n_devices=2)
    assert metrics["timing_s/gen"] == 2.0 and metrics["timing_s/update_actor"] == 1.0
    assert metrics["perf/total_num_tokens"] == tokens
    assert metrics["perf/throughput"] == tokens / 4.0 / 2
    assert metrics["perf/generated_tokens_per_s"] == sum(FLAT_LENGTHS) / 2.0


def test_data_proto_gives_the_same_as_a_mapping():
    from posttrain.protocol import DataProto

    assert step_metrics(DataProto.from_single_dict(batch())) == step_metrics(batch())


def test_sums_do_not_lose_small_values_beside_large_ones():
    values = torch.zeros(3, 1, dtype=torch.float64)
    values[:, 0] = torch.tensor([1e16, 1.0, -1e16], dtype=torch.float64)
    metrics = step_metrics({"response_mask": torch.ones(3, 1), "token_level_scores": values})
    assert metrics["reward_mean"] == 1 / 3


def test_bfloat16_scores_are_read_exactly():
    assert step_metrics(batch(torch.bfloat16))["reward_mean"] == step_metrics(batch())["reward_mean"]


def test_missing_fields_are_named():
    with pytest.raises(KeyError, match="response_mask and token_level_scores"):
        step_metrics({"response_mask": torch.ones(1, 1)})


def test_explained_variance_is_not_told_where_returns_are_equal_up_to_rounding():
    given = batch()
    given["values"] = torch.randn(ROWS, WIDTH)
    given["returns"] = torch.full((ROWS, WIDTH), 0.7)
    given["returns"][0, 0] += 1e-7
    assert "critic/vf_explained_var" not in step_metrics(given)
    given["returns"][0, 0] += 0.1
    assert step_metrics(given)["critic/vf_explained_var"] < 1
