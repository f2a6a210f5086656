"""Aggregation modes against plain formulas, and that no split of a mini-batch changes loss or gradient."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.algorithms import (
    AGGREGATION_MODES,
    AlgorithmError,
    agg_loss,
    aggregation_weights,
    call_policy_loss,
    kl_penalty,
    mask_counts,
    register_policy_loss,
    token_share,
)
from posttrain.algorithms.registry import POLICY_LOSSES

LOSSES = torch.tensor([[1.0, 9.0, 9.0], [2.0, 2.0, 2.0]])
MASK = torch.tensor([[1, 0, 0], [1, 1, 1]])


def rows_of(losses: torch.Tensor, mask: torch.Tensor) -> list[list[float]]:
    rows = [row[m.bool()].tolist() for row, m in zip(losses, mask, strict=True)]
    return [row for row in rows if row]


PLAIN = {
    "token-mean": lambda rows, c: math.fsum(map(math.fsum, rows)) / sum(map(len, rows)),
    "token-sum": lambda rows, c: math.fsum(map(math.fsum, rows)),
    "seq-mean-token-sum": lambda rows, c: math.fsum(map(math.fsum, rows)) / len(rows),
    "seq-mean-token-mean": lambda rows, c: math.fsum(math.fsum(row) / len(row) for row in rows) / len(rows),
    "seq-mean-token-sum-norm": lambda rows, c: math.fsum(math.fsum(row) / c for row in rows) / len(rows),
}


def test_the_plain_formulas_cover_every_mode():
    assert set(PLAIN) == set(AGGREGATION_MODES)


@pytest.mark.parametrize("mode", list(PLAIN))
def test_every_mode_equals_its_plain_formula_on_ragged_rows(ragged, mode):
    expected = PLAIN[mode](rows_of(ragged.losses, ragged.mask), 7.5)
    assert agg_loss(ragged.losses, ragged.mask, mode, loss_scale_factor=7.5).item() == pytest.approx(
        expected, abs=1e-12
    )


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        pytest.param("token-mean", 1.75, id="S0_34_S2_34"),
        pytest.param("seq-mean-token-mean", 1.5, id="S2_35"),
        pytest.param("seq-mean-token-sum", 3.5, id="S2_36"),
        pytest.param("seq-mean-token-sum-norm", 0.875, id="S2_44"),
        pytest.param("token-sum", 7.0, id="token_sum"),
    ],
)
def test_token_losses_1_and_2_2_2(mode, value):
    assert agg_loss(LOSSES, MASK, mode, loss_scale_factor=4).item() == pytest.approx(value)


def test_token_mean_is_the_default():
    assert agg_loss(LOSSES, MASK).item() == pytest.approx(1.75)


def test_an_unknown_mode_lists_the_known_ones_and_the_nearest():
    with pytest.raises(AlgorithmError, match=r"Did you mean `token-mean`\?.*seq-mean-token-sum-norm.*token-sum"):
        aggregation_weights(MASK, "token_mean")


def test_neither_padding_nor_longer_rows_elsewhere_change_a_rows_share():
    def share(mask: torch.Tensor) -> list[float]:
        return aggregation_weights(mask, "seq-mean-token-sum-norm", loss_scale_factor=4)[0, :3].tolist()

    padded = torch.cat([MASK, torch.zeros(2, 5, dtype=torch.int64)], dim=1)
    longer = padded.clone()
    longer[1] = 1
    assert share(MASK) == share(padded) == share(longer) == [0.125, 0.0, 0.0]


@pytest.mark.parametrize("constant", [None, 0, -1.0])
def test_the_constant_must_be_given_and_positive(constant):
    with pytest.raises(AlgorithmError, match=r"actor_rollout_ref\.actor\.loss_scale_factor"):
        aggregation_weights(MASK, "seq-mean-token-sum-norm", loss_scale_factor=constant)


@pytest.mark.parametrize("mode", list(PLAIN))
def test_a_batch_without_any_response_token_gives_0(mode):
    empty = torch.zeros(2, 3)
    assert agg_loss(torch.full((2, 3), float("nan")), empty, mode, loss_scale_factor=4).item() == 0


@pytest.mark.parametrize("mode", list(PLAIN))
def test_rows_without_response_tokens_do_not_count(mode):
    more = torch.cat([MASK, torch.zeros_like(MASK)])
    first = agg_loss(LOSSES, MASK, mode, loss_scale_factor=4)
    second = agg_loss(torch.cat([LOSSES, LOSSES]), more, mode, loss_scale_factor=4)
    assert first.item() == second.item()


@pytest.mark.parametrize("mode", list(PLAIN))
def test_aggregation_passes_gradcheck(ragged, mode):
    losses = ragged.losses.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: agg_loss(x, ragged.mask, mode, loss_scale_factor=3.0), losses)


@pytest.mark.parametrize("mode", list(PLAIN))
def test_no_split_into_1_2_4_8_or_16_parts_changes_the_gradient_of_policy_and_kl_loss(ragged, mode):
    tokens, rows = mask_counts(ragged.mask)
    config = {"clip_ratio": 0.2, "clip_ratio_c": 3.0}

    def gradient(parts: int) -> tuple[float, torch.Tensor]:
        log_prob = ragged.log_prob.clone().requires_grad_()
        total = 0.0
        for ids in torch.arange(16).chunk(parts):
            mask = ragged.mask[ids]
            result = call_policy_loss(
                "vanilla",
                old_log_prob=ragged.old_log_prob[ids],
                log_prob=log_prob[ids],
                advantages=ragged.advantages[ids],
                response_mask=mask,
                config=config,
            )
            token_losses = result.loss + 0.1 * kl_penalty(log_prob[ids], ragged.ref_log_prob[ids], "low_var_kl")
            loss = agg_loss(
                token_losses, mask, mode, loss_scale_factor=5.0, total_tokens=int(tokens), total_rows=int(rows)
            )
            loss.backward()
            total += loss.item()
        assert log_prob.grad is not None
        return total, log_prob.grad

    loss, whole = gradient(1)
    assert whole.abs().sum() > 0
    for parts in (2, 4, 8, 16):
        loss_split, split = gradient(parts)
        assert (split - whole).abs().max().item() <= 1e-12
        assert loss_split == pytest.approx(loss, abs=1e-12)


def test_a_scalar_token_mean_weighted_by_its_share_of_tokens_is_exact_under_every_split(ragged):
    @register_policy_loss("scalar_for_split_test")
    def compute_my_policy_loss(old_log_prob, log_prob, advantages, response_mask, **kwargs):
        ratio = torch.exp(log_prob - old_log_prob)
        loss = (-advantages * ratio * response_mask).sum() / response_mask.sum()
        return loss, {"my_metric": loss.item()}

    def gradient(parts: int) -> torch.Tensor:
        log_prob = ragged.log_prob.clone().requires_grad_()
        for ids in torch.arange(16).chunk(parts):
            result = call_policy_loss(
                "scalar_for_split_test",
                old_log_prob=ragged.old_log_prob[ids],
                log_prob=log_prob[ids],
                advantages=ragged.advantages[ids],
                response_mask=ragged.mask[ids],
            )
            assert result.is_scalar
            (result.loss * token_share(ragged.mask[ids], mask_counts(ragged.mask)[0])).backward()
        assert log_prob.grad is not None
        return log_prob.grad

    try:
        whole = gradient(1)
        assert whole.abs().sum() > 0
        for parts in (2, 4, 8, 16):  # 16 parts: two of them hold no token, where a mean is 0/0
            assert (gradient(parts) - whole).abs().max().item() <= 1e-12
    finally:
        del POLICY_LOSSES["scalar_for_split_test"]
