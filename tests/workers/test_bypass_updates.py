"""Old log-probs of the rollout: updates compare the policy being trained with it, in any split of a mini-batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.config import load_config
from posttrain.protocol import DataProto
from posttrain.workers.actor.dp_actor import DataParallelPPOActor

ACTOR, SECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
ROWS, WIDTH = 12, 6
MOVED = 0.05  # by which every update of the stand-in moves the log-probs


class Policy:
    """A train engine without a model: log-probs that are given, cut into passes of `size` rows."""

    def __init__(self, log_probs_BR: torch.Tensor, size: int) -> None:
        self.log_probs_BR, self.size, self.updates = log_probs_BR, size, 0
        self.gradients: list[torch.Tensor] = []

    def now(self, data: DataProto) -> torch.Tensor:
        return self.log_probs_BR[data.batch["row"]] + MOVED * self.updates

    def log_probs(self, data: DataProto, **_: Any) -> dict[str, torch.Tensor]:
        return {"log_probs": self.now(data)}

    def take_save_wait(self) -> float:
        return 0.0

    def update(self, data: DataProto, loss: Any, **_: Any) -> dict[str, float]:
        leaf = self.now(data).requires_grad_()
        for start in range(0, len(data), self.size):
            part = slice(start, start + self.size)
            loss(data[part], {"log_probs": leaf[part], "entropy": torch.zeros_like(leaf[part])}).backward()
        assert leaf.grad is not None
        self.gradients.append(leaf.grad)
        self.updates += 1
        return {"grad_norm": 1.0, "lr": 1.0, "skipped": 0.0}


@pytest.fixture
def batch() -> DataProto:
    generator = torch.Generator().manual_seed(3)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) * scale

    mask = torch.ones(ROWS, WIDTH)
    for row in range(ROWS):
        mask[row, 1 + row % WIDTH :] = 0
    rollout = (-1.5 + normal(0.3)) * mask
    tensors = {
        "row": torch.arange(ROWS),
        "response_mask": mask,
        "rollout_log_probs": rollout,
        "old_log_probs": rollout.clone(),
        "advantages": normal(1.0) * mask,
        "now": (rollout + normal(0.3)) * mask,
    }
    uid = np.array([str(row // 3) for row in range(ROWS)], dtype=object)
    return DataProto.from_dict(tensors, {"uid": uid}, {"step": 1})


def update(batch: DataProto, *settings: str, size: int = ROWS, prompts: int = 4) -> tuple[Policy, dict[str, float]]:
    """The updates of a batch with these settings, in passes of `size` rows; two with `prompts=2`."""
    given = [f"{ACTOR}.old_log_probs=rollout", f"{ACTOR}.ppo_mini_batch_size={prompts}", *settings]
    shared = ["data.train_batch_size=4", "actor_rollout_ref.rollout.n=3", "algorithm.adv_estimator=grpo"]
    policy: Any = Policy(batch.batch["now"], size)
    actor = DataParallelPPOActor(load_config([*given, *shared]).config, policy)
    return policy, actor.update_policy(batch)


def plain_tokens(batch: DataProto, first: int, last: int, moved: float) -> list[tuple[int, int, float, float]]:
    """(row, place, log-ratio to the rollout, advantage) of the tokens of these rows."""
    gap = batch.batch["now"] + moved - batch.batch["rollout_log_probs"]
    mask, advantages = batch.batch["response_mask"], batch.batch["advantages"]
    places = [(row, t) for row in range(first, last) for t in range(WIDTH) if mask[row, t]]
    return [(row, t, float(gap[row, t]), float(advantages[row, t])) for row, t in places]


def clipped(d: float, advantage: float) -> float:
    """The derivative of PPO's loss by the log-prob, with the clips 0.2 and 3."""
    ratio = math.exp(d)
    if (advantage > 0 and ratio > 1.2) or (advantage < 0 and (ratio < 0.8 or ratio > 3)):
        return 0.0
    return -advantage * ratio


def plain_gradient(tokens: list[tuple[int, int, float, float]], form: str) -> dict[tuple[int, int], float]:
    """By the words of the documentation, token by token."""
    rows: dict[int, list[float]] = {}
    for row, _, d, _ in tokens:
        rows.setdefault(row, []).append(d)
    token_weight = {(row, t): min(math.exp(d), 1.1) for row, t, d, _ in tokens}
    norm = math.fsum(token_weight.values()) / len(tokens)
    row_norm = math.fsum(min(math.exp(sum(ds)), 1.5) for ds in rows.values()) / len(rows)
    found = {}
    for row, t, d, advantage in tokens:
        whole = min(math.exp(sum(rows[row])), 1.5)
        mean = math.exp(sum(rows[row]) / len(rows[row]))
        found[row, t] = {
            "clip": lambda d=d, a=advantage: clipped(d, a),
            "clip, rejection": lambda d=d, a=advantage: clipped(d, a) * (math.exp(d) - 1 - d <= 0.03),
            "reinforce": lambda a=advantage: -a,
            "reinforce, tokens": lambda a=advantage, key=(row, t): -a * token_weight[key],
            "reinforce, tokens of mean 1": lambda a=advantage, key=(row, t): -a * token_weight[key] / norm,
            "reinforce, responses of mean 1": lambda a=advantage, w=whole: -a * w / row_norm,
            "reinforce, responses, rejection": lambda a=advantage, w=whole, m=mean: -a * w * (0.9 <= m <= 1.25),
        }[form]() / len(tokens)
    return found


TOKENS = [f"{SECTION}.rollout_is=token", f"{SECTION}.rollout_is_threshold=1.1"]
RESPONSES = [f"{SECTION}.rollout_is=sequence", f"{SECTION}.rollout_is_threshold=1.5"]
MEAN_1 = f"{SECTION}.rollout_is_batch_normalize=True"
REINFORCE = f"{ACTOR}.policy_loss.loss_mode=gpg"
FORMS = {
    "clip": TOKENS,  # measured alone: the ratio is that to the rollout
    "clip, rejection": [f"{SECTION}.rollout_rs=token_k3", f"{SECTION}.rollout_rs_threshold=0.03"],
    "reinforce": [REINFORCE],
    "reinforce, tokens": [REINFORCE, *TOKENS],
    "reinforce, tokens of mean 1": [REINFORCE, *TOKENS, MEAN_1],
    "reinforce, responses of mean 1": [REINFORCE, *RESPONSES, MEAN_1],
    "reinforce, responses, rejection": [
        REINFORCE,
        *RESPONSES,
        f"{SECTION}.rollout_rs=seq_mean_k1",
        f"{SECTION}.rollout_rs_threshold=0.9_1.25",
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_both_updates_of_a_batch_have_the_gradient_of_the_plain_formula_in_every_split(batch, form):
    whole, metrics = update(batch, *FORMS[form], prompts=2)
    for number, gradient in enumerate(whole.gradients):
        tokens = plain_tokens(batch, 6 * number, 6 * number + 6, MOVED * number)
        expected = torch.zeros(6, WIDTH, dtype=torch.float64)
        for (row, t), value in plain_gradient(tokens, form).items():
            expected[row - 6 * number, t] = value
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-8)
    for size in (1, 4):
        parts, again = update(batch, *FORMS[form], prompts=2, size=size)
        for one, other in zip(whole.gradients, parts.gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        assert again == pytest.approx(metrics, rel=1e-6)


def test_the_metrics_tell_of_the_gap_of_the_policy_being_trained(batch):
    _, metrics = update(batch, *FORMS["reinforce, responses, rejection"], MEAN_1)
    tokens = plain_tokens(batch, 0, ROWS, 0.0)
    sums = [math.fsum(d for row, _, d, _ in tokens if row == which) for which in range(ROWS)]
    lengths = [sum(row == which for row, *_ in tokens) for which in range(ROWS)]
    lost = [not 0.9 <= math.exp(total / length) <= 1.25 for total, length in zip(sums, lengths, strict=True)]
    weights = [min(math.exp(total), 1.5) for total in sums]
    expected = {
        "rollout_is/mean": math.fsum(math.exp(total) for total in sums) / ROWS,
        "rollout_is/max": max(map(math.exp, sums)),
        "rollout_is/truncated": sum(math.exp(total) > 1.5 for total in sums) / ROWS,
        "rollout_is/norm": math.fsum(weights) / ROWS,
        "rollout_is/ess": math.fsum(weights) ** 2 / (ROWS * math.fsum(w * w for w in weights)),
        "rollout_rs/rejected_rows": sum(lost) / ROWS,
        "rollout_rs/rejected": sum(n for n, gone in zip(lengths, lost, strict=True) if gone) / len(tokens),
        "mismatch/kl": -math.fsum(d for _, _, d, _ in tokens) / len(tokens),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert (
        0 < expected["rollout_rs/rejected"] < 1 and metrics["rollout_rs/seq_mean_k1"] == metrics["rollout_rs/rejected"]
    )


def test_weights_of_filters_remain_beside_a_ratio_to_the_rollout(batch):
    """The ratio ends at the log-probs before `top_p`; what was sampled from is another distribution."""
    batch.batch["sampling_log_probs"] = batch.batch["rollout_log_probs"] + 0.4 * batch.batch["response_mask"]
    filters = "actor_rollout_ref.rollout.top_p=0.9"
    policy, metrics = update(batch, *TOKENS, filters)
    plain, _ = update(batch, filters)
    torch.testing.assert_close(policy.gradients[0], plain.gradients[0] * math.exp(-0.4), rtol=1e-6, atol=1e-9)
    assert metrics["rollout_is/mean"] < 0.9


def test_a_mean_of_zero_divides_nothing(batch):
    policy, metrics = update(
        batch, REINFORCE, f"{SECTION}.rollout_is=token", f"{SECTION}.rollout_is_threshold=90_99", MEAN_1
    )
    assert metrics["rollout_is/norm"] == 1.0 and metrics["rollout_is/masked"] == pytest.approx(1.0)
    assert not policy.gradients[0].any()
