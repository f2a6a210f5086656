"""Document 3's formulas and metrics, recomputed from what a run recorded."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from seen import groups, relative_to_group

MINI, N = "actor_rollout_ref__actor__ppo_mini_batch_size", "actor_rollout_ref__rollout__n"
CLIP, BETA, RATE = 0.2, 0.05, 3e-3


def scores(samples: list[dict]) -> list[float]:
    return [row["score"] for row in samples]


def test_advantages_are_rewards_relative_to_their_group_and_not_ranks(grpo):
    for rows in groups(grpo.samples()).values():
        found = [row["advantages"][0] for row in rows]
        assert found == pytest.approx(relative_to_group(scores(rows)), abs=1e-5)
    widest = max(groups(grpo.samples()).values(), key=lambda rows: len(set(scores(rows))))
    values = sorted({round(row["advantages"][0], 4) for row in widest})
    assert len(values) >= 3
    assert len({round(above - below, 2) for below, above in pairwise(values)}) > 1  # ranks would be evenly spaced


def test_the_sign_of_an_advantage_is_that_of_reward_minus_group_mean(grpo):
    signs = {-1: 0, 0: 0, 1: 0}
    for step in (1, 2):
        for rows in groups(grpo.samples(step)).values():
            mean = math.fsum(scores(rows)) / len(rows)
            for row in rows:
                above = 0 if abs(row["score"] - mean) < 1e-9 else math.copysign(1, row["score"] - mean)
                assert all((value > 0) - (value < 0) == above for value in row["advantages"]), (row["score"], mean)
                signs[int(above)] += 1
    assert signs[1] > 3 and signs[-1] > 3


def test_several_samples_per_prompt_under_grpo_and_one_under_gae(grpo, small):
    one = small(algorithm__adv_estimator="gae", **{N: 1})
    assert {len(rows) for rows in groups(grpo.samples()).values()} == {5}
    assert {len(rows) for rows in groups(one.samples()).values()} == {1}


def plain_log_probs(model: torch.nn.Module, row: dict) -> torch.Tensor:
    """Log-probs of one sample's response tokens, by a forward pass over that sample alone."""
    ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
    start = len(row["prompt_ids"])
    logits = model(input_ids=ids).logits[0].double()
    return logits.log_softmax(-1)[start - 1 : -1].gather(-1, ids[0, start:, None])[:, 0]


def objective(model: torch.nn.Module, samples: list[dict]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Minus document 3's objective, its two terms, and the ratios of all tokens; means over all tokens."""
    policy, kl, ratios = [], [], []
    for rows in groups(samples).values():
        for row, advantage in zip(rows, relative_to_group(scores(rows)), strict=True):
            new, old, ref = (
                plain_log_probs(model, row),
                *map(torch.tensor, (row["old_log_probs"], row["ref_log_probs"])),
            )
            ratio = (new - old.double()).exp()
            policy.append(-torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage))
            behind = ref.double() - new
            kl.append(behind.exp() - behind - 1)
            ratios.append(ratio.detach())
    return torch.cat(policy).mean(), torch.cat(kl).mean(), torch.cat(ratios)


def test_the_logged_loss_is_minus_the_objective_recomputed_in_float64_from_the_samples(small, tiny_model):
    """Three passes over one batch; the weights between them are followed by a plain AdamW over a plain model."""
    from transformers import AutoModelForCausalLM

    seen = small(
        trainer__total_training_steps=1,
        actor_rollout_ref__model__dtype="float64",
        actor_rollout_ref__actor__use_kl_loss=True,
        actor_rollout_ref__actor__kl_loss_coef=BETA,
        actor_rollout_ref__actor__ppo_epochs=3,
        actor_rollout_ref__actor__clip_ratio=CLIP,
        actor_rollout_ref__actor__optim__lr=RATE,
        actor_rollout_ref__actor__optim__weight_decay=0.0,
        data__max_response_length=8,
    )
    samples, logged = seen.samples(), seen.steps[0]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64, attn_implementation="eager")
    adam = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    terms, norms = [], []
    for _ in range(3):
        policy, kl, ratio = objective(model, samples)
        (policy + BETA * kl).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        adam.step()
        adam.zero_grad()
        terms.append((policy.item(), kl.item()))
    assert ((ratio < 1 - CLIP) | (ratio > 1 + CLIP)).any() and ratio.max() < 3  # clipped, below the dual clip
    policy, kl = (sum(values) / 3 for values in zip(*terms, strict=True))
    assert kl > 1e-3 and abs(policy) > 1e-2
    assert logged["policy_loss"] == pytest.approx(policy, rel=1e-5)
    assert logged["kl_loss"] == pytest.approx(kl, rel=1e-5)
    assert logged["actor/loss"] == pytest.approx(policy + BETA * kl, rel=1e-5)
    assert logged["actor/grad_norm"] == pytest.approx(sum(norms) / 3, rel=1e-5)


def test_before_the_first_update_the_ratio_is_one_for_every_token(grpo):
    for batch, now in zip(grpo.trainer.batches, grpo.trainer.log_probs_before_update, strict=True):
        real = batch.batch["response_mask"].bool()
        ratio = (now - batch.batch["old_log_probs"]).exp()[real]
        assert ratio.numel() == 120 and (ratio - 1).abs().max() < 1e-5


def test_the_key_from_a_file_changes_the_aggregation_alone(small, tmp_path):
    from posttrain.config import load_config

    (tmp_path / "drgrpo.yaml").write_text(
        "algorithm: {adv_estimator: grpo}\nactor_rollout_ref:\n  actor:\n    loss_agg_mode: seq-mean-token-sum-norm\n"
    )
    loaded = load_config(["--config-path", str(tmp_path), "--config-name", "drgrpo"])
    actor = loaded.config.actor_rollout_ref.actor
    assert actor.loss_agg_mode == "seq-mean-token-sum-norm"
    note = next(note for note in loaded.notes if "DrGRPO" in note)
    assert "algorithm.norm_adv_by_std_in_grpo=False" in note
    more = {"data__max_response_length": 30, "trainer__total_training_steps": 1}
    plain = small(**more)
    summed = small(**more, actor_rollout_ref__actor__loss_agg_mode="seq-mean-token-sum-norm")
    for ours, theirs in zip(plain.samples(), summed.samples(), strict=True):
        assert ours["response_ids"] == theirs["response_ids"] and ours["advantages"] == theirs["advantages"]
    rows = summed.samples()
    # On-policy the ratio is 1: a response's share is minus its advantage times its length, over the longest allowed.
    wanted = -math.fsum(row["advantages"][0] * len(row["response_ids"]) / 30 for row in rows) / len(rows)
    assert summed.steps[0]["policy_loss"] == pytest.approx(wanted, abs=1e-6)
    tokens = sum(len(row["response_ids"]) for row in rows)
    mean = -math.fsum(row["advantages"][0] * len(row["response_ids"]) for row in rows) / tokens
    assert plain.steps[0]["policy_loss"] == pytest.approx(mean, abs=1e-6)
    assert abs(wanted - mean) > 1e-5


def test_reward_and_length_metrics_are_those_of_the_samples(grpo):
    for step, line in zip((1, 2), grpo.steps, strict=True):
        samples = grpo.samples(step)
        assert line["reward_mean"] == pytest.approx(math.fsum(scores(samples)) / 20)
        deviations = []
        for rows in groups(samples).values():
            mean = math.fsum(scores(rows)) / 5
            deviations.append(math.sqrt(math.fsum((score - mean) ** 2 for score in scores(rows)) / 4))
        assert line["reward_std"] == pytest.approx(math.fsum(deviations) / 4)
        assert line["response_length"] == math.fsum(sum(row["response_mask"]) for row in samples) / 20


def test_policy_and_kl_loss_are_means_over_the_mini_batches(small, monkeypatch):
    from posttrain.workers.actor.dp_actor import DataParallelPPOActor

    each, plain = [], DataParallelPPOActor._step

    def step(self, mini):
        made = plain(self, mini)
        each.append(made.numbers())
        return made

    monkeypatch.setattr(DataParallelPPOActor, "_step", step)
    seen = small(**{MINI: 1}, actor_rollout_ref__actor__use_kl_loss=True, trainer__seed=73)
    assert len(each) == 8
    for line, parts in zip(seen.steps, (each[:4], each[4:]), strict=True):
        for name in ("policy_loss", "kl_loss"):
            assert line[name] == pytest.approx(math.fsum(part[name] for part in parts) / 4)
    assert each[0]["kl_loss"] == pytest.approx(0, abs=1e-9) and each[1]["kl_loss"] > 1e-9
