"""Every policy loss against its paper's formula in plain Python, and its gradient against central differences.

A loss with a stop-gradient is differentiated here as its paper means it: the stopped part is held fixed.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from posttrain.algorithms import AlgorithmError, call_policy_loss, prepare_policy_loss
from posttrain.algorithms.registry import POLICY_LOSSES
from posttrain.config.root import ActorConfig, PolicyLossConfig

LOW, HIGH, C = 0.15, 0.3, 1.5
STEP = 1e-6


def settings(**changed) -> ActorConfig:
    own = PolicyLossConfig(
        clip_cov_ratio=0.1,
        kl_cov_ratio=0.1,
        clip_cov_lb=0.05,
        clip_cov_ub=0.2,
        dro_beta=0.7,
        tau_pos=1.2,
        tau_neg=1.7,
        ppo_kl_coef=0.6,
        cppo_w_min=0.5,
        cppo_delta_b=0.03,
        cppo_delta_b_q=0.3,
        cppo_delta_b_k=1.3,
        cppo_delta_b_max_mult=6.0,
    )
    return ActorConfig(
        **({"clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_ratio_c": C, "policy_loss": own} | changed)
    )


@pytest.fixture
def batch(ragged) -> SimpleNamespace:
    """Advantages that differ within a row; log-probs below 0, as real ones are."""
    batch = SimpleNamespace(mask=ragged.mask, advantages=ragged.advantages)
    batch.log_prob, batch.old = (-x.abs() - 0.02 for x in (ragged.log_prob + 1.3, ragged.old_log_prob + 1.3))
    fields = {"response_mask": batch.mask, "advantages": batch.advantages, "old_log_probs": batch.old}
    batch.mini = SimpleNamespace(batch=fields, meta_info={"step": 3})
    return batch


def loss_of(name: str, batch, log_prob: torch.Tensor | None = None, config: ActorConfig | None = None, **more):
    config = config or settings()
    prepared = prepare_policy_loss(name, batch.mini, config)
    log_prob = batch.log_prob if log_prob is None else log_prob
    return call_policy_loss(
        name,
        old_log_prob=batch.old,
        log_prob=log_prob,
        advantages=batch.advantages,
        response_mask=batch.mask,
        config=config,
        prepared=prepared,
        **more,
    )


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


class Token:
    """One token as the papers see it; `at` is the point where stopped parts are evaluated."""

    def __init__(self, batch, row: int, t: int, lp: torch.Tensor, at: torch.Tensor) -> None:
        self.row, self.t, self.mask = row, t, batch.mask
        self.a, self.q = batch.advantages[row, t].item(), batch.old[row, t].item()
        self.lp, self.fixed = lp[row, t].item(), at[row, t].item()
        self.d, self.d_fixed = self.lp - self.q, self.fixed - self.q
        places = [k for k in range(7) if batch.mask[row, k]]
        self.row_d = [lp[row, k].item() - batch.old[row, k].item() for k in places]
        self.row_d_fixed = [at[row, k].item() - batch.old[row, k].item() for k in places]
        self.row_moved = [abs(math.exp(at[row, k].item()) - math.exp(batch.old[row, k].item())) for k in places]
        self.place = places.index(t)
        self.row_a = math.fsum(batch.advantages[row, k].item() for k in places) / len(places)


def clipped(a: float, ratio: float) -> float:
    return max(-a * ratio, -a * clip(ratio, 1 - LOW, 1 + HIGH))


def plain_vanilla(x: Token, chosen: bool) -> float:
    loss = clipped(x.a, math.exp(x.d))
    return min(loss, -x.a * C) if x.a < 0 else loss


def plain_gspo(x: Token, chosen: bool) -> float:
    ratio = math.exp(math.fsum(x.row_d_fixed) / len(x.row_d_fixed)) * math.exp(x.lp - x.fixed)
    return clipped(x.a, ratio)


def plain_sapo(x: Token, chosen: bool) -> float:
    tau = 1.2 if x.a > 0 else 1.7
    return -x.a * 4 / tau / (1 + math.exp(-tau * (math.exp(x.d) - 1)))


def plain_cispo(x: Token, chosen: bool) -> float:
    return -clip(math.exp(x.d_fixed), 1 - LOW, 1 + HIGH) * x.a * x.lp


def plain_gpg(x: Token, chosen: bool) -> float:
    return -x.a * x.lp


def plain_clip_cov(x: Token, chosen: bool) -> float:
    return 0.0 if chosen else clipped(x.a, math.exp(x.d))


def plain_kl_cov(x: Token, chosen: bool) -> float:
    return -x.a * math.exp(x.d) + (0.6 * abs(x.d) if chosen else 0.0)


def plain_geo_mean(x: Token, chosen: bool) -> float:
    outward = min if x.row_a > 0 else max
    return -x.row_a * math.exp(math.fsum(outward(d, clip(d, -LOW, HIGH)) for d in x.row_d) / len(x.row_d))


def plain_dppo_tv(x: Token, chosen: bool) -> float:
    moved = math.exp(x.fixed) - math.exp(x.q)
    kept = moved <= HIGH if x.a > 0 else moved >= -LOW
    return -x.a * min(math.exp(x.d_fixed), C) * x.lp if kept else 0.0


def plain_dppo_kl(x: Token, chosen: bool) -> float:
    p, q = math.exp(x.fixed), math.exp(x.q)
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    kept = (kl <= HIGH or p <= q) if x.a > 0 else (kl <= LOW or p >= q)
    return -x.a * min(math.exp(x.d_fixed), C) * x.lp if kept else 0.0


def plain_cppo(x: Token, chosen: bool) -> float:
    """By the recurrences of the paper, with budgets from 0.03 to 0.18, and delta 0.2."""
    moved, length = x.row_moved, len(x.row_moved)
    ordered, at = sorted(moved), 0.3 * (length - 1)
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    budget = clip(1.3 * (low + (at - math.floor(at)) * (high - low)), 0.03, 0.18)
    spent = earned = 0.0
    for t in range(x.place + 1):
        weight = 1 - 0.5 * t / max(length - 1, 1)
        threshold = min(0.2, 0.2 + budget * earned - spent)
        kept = weight * moved[t] <= threshold
        spent, earned = spent + weight * moved[t], earned + weight
    kept = kept or x.a * (math.exp(x.d_fixed) - 1) <= 0
    return -x.a * min(math.exp(x.d_fixed), C) * x.lp if kept else 0.0


def plain_dro(x: Token, chosen: bool) -> float:
    return -x.a * x.lp + 0.35 * x.d**2


PLAIN = {name.removeprefix("plain_"): found for name, found in [*globals().items()] if name.startswith("plain_")}
OTHERS = [name for name in PLAIN if name != "vanilla"]  # test_policy_loss.py has more on vanilla


def plain_losses(name: str, batch, lp: torch.Tensor, at: torch.Tensor, rows=range(16)) -> torch.Tensor:
    chosen = prepare_policy_loss(name, batch.mini, settings()).get("chosen", torch.zeros(16, 7))
    out = torch.zeros(16, 7, dtype=torch.float64)
    for row in rows:
        for t in range(7):
            if batch.mask[row, t]:
                out[row, t] = PLAIN[name](Token(batch, row, t, lp, at), bool(chosen[row, t]))
    return out


def test_every_policy_loss_has_a_plain_formula_here():
    assert set(PLAIN) == {name for name in POLICY_LOSSES if not name.startswith("scalar_for")}


@pytest.mark.parametrize("name", PLAIN)
def test_every_token_equals_the_plain_formula(batch, name):
    result = loss_of(name, batch)
    assert torch.allclose(
        result.loss, plain_losses(name, batch, batch.log_prob, batch.log_prob), rtol=1e-10, atol=1e-12
    )
    assert not result.is_scalar
    for value in result.metrics.values():
        assert isinstance(value, torch.Tensor) and not value[batch.mask == 0].any() and not value.requires_grad


@pytest.mark.parametrize("name", PLAIN)
def test_the_gradient_equals_central_differences_of_the_plain_formula(batch, name):
    weights = torch.rand(16, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    log_prob = batch.log_prob.clone().requires_grad_()
    (weights * loss_of(name, batch, log_prob).loss).sum().backward()
    assert log_prob.grad is not None and log_prob.grad.abs().max() > 0.1
    for row in range(0, 16, 3):
        for t in range(7):
            up, down = batch.log_prob.clone(), batch.log_prob.clone()
            up[row, t], down[row, t] = up[row, t] + STEP, down[row, t] - STEP
            high, low = ((weights * plain_losses(name, batch, lp, batch.log_prob, [row])).sum() for lp in (up, down))
            assert log_prob.grad[row, t].item() == pytest.approx(((high - low) / (2 * STEP)).item(), abs=1e-7)


@pytest.mark.parametrize("name", ["vanilla", "sapo", "geo_mean", "gpg", "dro", "clip_cov", "kl_cov"])
def test_losses_without_a_stopped_part_pass_gradcheck(batch, name):
    assert torch.autograd.gradcheck(lambda lp: loss_of(name, batch, lp).loss, batch.log_prob.clone().requires_grad_())


@pytest.mark.parametrize("name", OTHERS)
def test_on_policy_the_gradient_is_that_of_the_plain_policy_gradient(batch, name):
    """ratio 1: nothing is clipped, dropped or penalised. clip_cov leaves its tokens out; geo_mean averages a row."""
    batch.old = batch.log_prob.clone()
    batch.mini.batch["old_log_probs"] = batch.old
    log_prob = batch.log_prob.clone().requires_grad_()
    loss_of(name, batch, log_prob).loss.sum().backward()
    expected = -batch.advantages * batch.mask
    if name == "clip_cov":
        expected = expected * (1 - prepare_policy_loss(name, batch.mini, settings())["chosen"])
    if name == "geo_mean":
        expected = expected.sum(-1, keepdim=True) / batch.mask.sum(-1, keepdim=True).clamp(min=1) * batch.mask
    assert torch.allclose(log_prob.grad, expected, atol=1e-12)


@pytest.mark.parametrize("gap", [20.0, -20.0, 200.0, -200.0, -1e6])
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_ratios_give_finite_losses_and_gradients(name, gap, dtype):
    old = torch.full((2, 2), -1.0 if gap < 0 else -1.0 - gap, dtype=dtype)
    log_prob = (old + gap).requires_grad_()
    advantages = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=dtype)
    small = SimpleNamespace(mask=torch.ones(2, 2), advantages=advantages, old=old)
    small.mini = SimpleNamespace(
        batch={"response_mask": small.mask, "advantages": advantages, "old_log_probs": old}, meta_info={}
    )
    result = loss_of(name, small, log_prob)
    result.loss.sum().backward()
    assert torch.isfinite(result.loss).all()
    assert torch.isfinite(log_prob.grad).all()
    assert all(torch.isfinite(torch.as_tensor(value)).all() for value in result.metrics.values())


@pytest.mark.parametrize("name", OTHERS)
def test_garbage_outside_the_mask_reaches_neither_loss_nor_gradient(batch, name):
    clean = batch.log_prob.clone().requires_grad_()
    expected = loss_of(name, batch, clean).loss
    expected.sum().backward()
    outside = batch.mask == 0
    for field in ("log_prob", "old", "advantages"):
        setattr(batch, field, getattr(batch, field).masked_fill(outside, float("nan")))
    batch.mini.batch |= {"advantages": batch.advantages, "old_log_probs": batch.old}
    dirty = batch.log_prob.clone().requires_grad_()
    losses = loss_of(name, batch, dirty).loss
    losses.sum().backward()
    assert torch.equal(losses.detach(), expected.detach())
    assert torch.equal(dirty.grad, clean.grad)


@pytest.mark.parametrize("name", [name for name in OTHERS if name != "geo_mean"])
def test_importance_weights_multiply_the_losses_and_carry_no_gradient(batch, name):
    weights = torch.rand(16, 7, dtype=torch.float64).requires_grad_()
    result = loss_of(name, batch, batch.log_prob.clone().requires_grad_(), rollout_is_weights=weights)
    assert torch.allclose(result.loss, weights.detach() * loss_of(name, batch).loss)
    result.loss.sum().backward()
    assert weights.grad is None


def weighted_geo_mean(batch, weights: torch.Tensor) -> torch.Tensor:
    """The loss of each token from products and roots: the ratios of its response times their weights."""
    out = torch.zeros(16, 7, dtype=torch.float64)
    for row in range(16):
        places = [t for t in range(7) if batch.mask[row, t] and weights[row, t] > 0]
        if not places:
            continue
        a = math.fsum(batch.advantages[row, t].item() for t in places) / len(places)
        product = 1.0
        for t in places:
            ratio = math.exp(batch.log_prob[row, t].item() - batch.old[row, t].item())
            bounded = clip(ratio, math.exp(-LOW), math.exp(HIGH))
            product *= (min if a > 0 else max)(ratio, bounded) * weights[row, t].item()
        out[row, places] = -a * product ** (1 / len(places))
    return out


@pytest.mark.parametrize("zeros", [False, True], ids=["all weighed", "some rejected"])
def test_geo_mean_weighs_a_response_by_the_geometric_mean_of_its_tokens_weights(batch, zeros):
    weights = torch.rand(16, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 0.05
    if zeros:
        weights[::2, 1] = 0.0
        weights[3] = 0.0
    given = weights.masked_fill(batch.mask == 0, float("nan")).requires_grad_()
    log_prob = batch.log_prob.clone().requires_grad_()
    losses = loss_of("geo_mean", batch, log_prob, rollout_is_weights=given).loss
    assert torch.allclose(losses, weighted_geo_mean(batch, weights), atol=1e-12)
    losses.sum().backward()
    assert given.grad is None and torch.isfinite(log_prob.grad).all()
    if zeros:
        assert not losses[3].any() and not log_prob.grad[::2, 1].any() and log_prob.grad[::2, 0].any()


def test_geo_mean_of_unclipped_ratios_corrects_all_the_way_to_the_policy_that_sampled(batch):
    """Ratio to the old policy times weight of the old policy = ratio to the rollout, whatever lies in between."""
    rollout = batch.old - 0.3 * batch.advantages.tanh()
    wide = settings(clip_ratio_low=50.0, clip_ratio_high=50.0)
    corrected = loss_of("geo_mean", batch, config=wide, rollout_is_weights=torch.exp(batch.old - rollout)).loss
    batch.old = rollout
    assert torch.allclose(corrected, loss_of("geo_mean", batch, config=wide).loss, atol=1e-12)


def test_gspo_of_equal_advantages_has_the_gradient_of_the_sequence_objective(batch):
    """GSPO's own objective, -A min(s, clip s) per response, differentiated whole."""
    batch.advantages = batch.advantages[:, :1].expand(16, 7).contiguous()
    token, whole = (batch.log_prob.clone().requires_grad_() for _ in range(2))
    loss_of("gspo", batch, token).loss.sum().backward()
    length = batch.mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = torch.exp(((whole - batch.old) * batch.mask).sum(-1, keepdim=True) / length)
    a = batch.advantages
    (torch.maximum(-a * ratio, -a * ratio.clamp(1 - LOW, 1 + HIGH)) * batch.mask).sum().backward()
    assert torch.allclose(token.grad, whole.grad, atol=1e-12)


def test_cispo_keeps_the_gradient_where_vanilla_drops_it():
    old, log_prob = torch.full((1, 1), -3.0), torch.full((1, 1), -1.0)
    grads = {}
    for name in ("vanilla", "cispo"):
        lp = log_prob.clone().requires_grad_()
        one = {"old_log_prob": old, "log_prob": lp, "advantages": torch.ones(1, 1), "response_mask": torch.ones(1, 1)}
        call_policy_loss(name, **one, config=settings()).loss.sum().backward()
        grads[name] = lp.grad.item()
    assert grads["vanilla"] == 0.0
    assert grads["cispo"] == pytest.approx(-(1 + HIGH))


def test_cispo_takes_a_lower_clip_of_1_as_no_bound(batch):
    losses = loss_of("cispo", batch, config=settings(clip_ratio_low=1.0)).loss
    weight = torch.exp(batch.log_prob - batch.old).clamp(max=1 + HIGH)
    assert torch.allclose(losses, -weight * batch.advantages * batch.log_prob * batch.mask)


def test_clip_cov_chooses_its_share_of_tokens_between_the_bounds_of_the_whole_mini_batch(batch):
    chosen = prepare_policy_loss("clip_cov", batch.mini, settings())["chosen"]
    mask = batch.mask.bool()
    a, lp = batch.advantages, batch.old
    covariance = (a - a[mask].mean()) * (lp - lp[mask].mean())
    assert int(chosen.sum()) == int(0.1 * int(mask.sum())) > 3
    assert (
        (covariance[chosen.bool()] > 0.05).all() and (covariance[chosen.bool()] < 0.2).all() and not chosen[~mask].any()
    )
    assert int((covariance[mask] >= 0.2).sum()) > 3 and int((covariance[mask] <= 0.05).sum()) > 3
    assert torch.equal(chosen, prepare_policy_loss("clip_cov", batch.mini, settings())["chosen"])


def test_kl_cov_chooses_the_tokens_with_the_largest_covariance(batch):
    chosen = prepare_policy_loss("kl_cov", batch.mini, settings())["chosen"].bool()
    mask = batch.mask.bool()
    a, lp = batch.advantages, batch.old
    covariance = (a - a[mask].mean()) * (lp - lp[mask].mean())
    assert int(chosen.sum()) == int(0.1 * int(mask.sum()))
    assert covariance[chosen].min() > covariance[mask & ~chosen].max()


@pytest.mark.parametrize(
    ("name", "field"),
    [("sapo", "tau_pos"), ("dro", "dro_beta"), ("kl_cov", "kl_cov_ratio"), ("clip_cov", "clip_cov_ratio")],
)
def test_settings_that_make_no_sense_are_named(batch, name, field):
    with pytest.raises(AlgorithmError, match=field):
        loss_of(name, batch, config=ActorConfig(policy_loss=PolicyLossConfig(**{field: 0.0})))


def test_prepare_must_give_a_dict(batch):
    from posttrain.algorithms import register_policy_loss

    register_policy_loss("prepares_nothing", prepare=lambda mini: None)(lambda log_prob, **kwargs: log_prob)
    try:
        with pytest.raises(AlgorithmError, match=r"prepare\(\).*`prepares_nothing` must return a dict"):
            prepare_policy_loss("prepares_nothing", batch.mini)
    finally:
        del POLICY_LOSSES["prepares_nothing"]
