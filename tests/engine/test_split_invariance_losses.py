"""Every split gives the gradient of the textbook, for every policy loss: 16 rows in 1 to 16 micro-batches, packed and
padded. The textbook is one pass over all rows, each alone through transformers' own forward pass (see `plain.py`); the
loss per token is that of tests/algorithms, where it is compared with its formula.
"""

import copy
import functools

import pytest
import torch
from engine_tools import ENTROPY, KL, TEMPERATURE, gradient, objective, ragged_batch
from plain import clipped_loss, flat_gradient, plain_loss, plain_model, plain_outputs

from posttrain.algorithms import AGGREGATION_MODES, call_policy_loss, prepare_policy_loss
from posttrain.algorithms.registry import POLICY_LOSSES
from posttrain.config.root import PolicyLossConfig, RolloutCorrectionConfig
from posttrain.workers.actor.correction import finish_importance_metrics

pytestmark = pytest.mark.slow
LIMITS = {torch.float32: 1e-6, torch.float64: 1e-12}
EXACT = {torch.float32: 1e-5, torch.float64: 1e-7}
LAYOUTS = [
    {"max_rows": rows, "pack": pack}
    for rows, pack in ((16, True), (16, False), (8, True), (4, False), (2, True), (1, False), (1, True))
]
FEW = [LAYOUTS[index] for index in (0, 2, 3)]  # whole, packed in 2 passes, padded in 4
BY_TYPE = {torch.float32: [*FEW, LAYOUTS[-1]], torch.float64: LAYOUTS}


def make_loss(name: str, mode: str = "token-mean"):
    own = PolicyLossConfig(loss_mode=name, clip_cov_ratio=0.1, clip_cov_lb=0.2, kl_cov_ratio=0.1)
    return objective(loss_agg_mode=mode, policy_loss=own)


@pytest.fixture(scope="module")
def textbook(tiny_model):
    """`textbook(name, mode)` or `textbook(weights=...)`: the flat gradient of the ragged batch in float64."""
    model, batch = plain_model(tiny_model), ragged_batch(prompts=5)
    outputs = plain_outputs(model, batch, TEMPERATURE)

    def losses(name: str, log_prob: torch.Tensor) -> torch.Tensor:
        config, fields = make_loss(name).config, batch.batch
        return call_policy_loss(
            name,
            old_log_prob=fields["old_log_probs"],
            log_prob=log_prob,
            advantages=fields["advantages"],
            response_mask=fields["response_mask"],
            config=config,
            prepared=prepare_policy_loss(name, batch, config),
        ).loss

    @functools.cache
    def expected(name: str = "vanilla", mode: str = "token-mean", weights: torch.Tensor | None = None) -> torch.Tensor:
        made = functools.partial(losses, name) if weights is None else lambda p: clipped_loss(p, batch, weights)
        return flat_gradient(plain_loss(outputs, batch, mode=mode, kl=KL, entropy=ENTROPY, token_loss=made), model)

    return expected


def compare(engines, dtype, batch, layouts, make, expected: torch.Tensor) -> None:
    whole_loss = make()
    whole = gradient(engines(dtype, layouts[0]), batch, whole_loss)
    assert whole.norm() > 1e-4
    assert float((whole.double() - expected).norm() / expected.norm()) < EXACT[dtype]
    for layout in layouts[1:]:
        loss = make()
        part = gradient(engines(dtype, layout), batch, loss)
        assert float((part - whole).norm() / whole.norm()) < LIMITS[dtype], layout
        for metric, value in whole_loss.metrics().items():
            assert loss.metrics()[metric] == pytest.approx(value, rel=1e-5, abs=1e-6), (layout, metric)


@pytest.mark.parametrize("dtype", LIMITS, ids=["float32", "float64"])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_gradient_of_every_loss_is_the_textbooks_in_every_split(engines, textbook, name, dtype):
    batch = ragged_batch(dtype=dtype, prompts=5)
    compare(engines, dtype, batch, BY_TYPE[dtype], lambda: make_loss(name), textbook(name))


@pytest.mark.parametrize("mode", [mode for mode in AGGREGATION_MODES if mode != "token-mean"])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_gradient_of_every_loss_and_aggregation_is_the_textbooks_in_every_split(engines, textbook, name, mode):
    compare(engines, torch.float64, ragged_batch(prompts=5), FEW, lambda: make_loss(name, mode), textbook(name, mode))


def test_the_correction_weighs_the_loss_and_its_diagnostics_are_the_same_in_every_split(engines, textbook):
    def make():
        loss = make_loss("vanilla")
        loss.correction = RolloutCorrectionConfig(
            rollout_is="sequence", rollout_is_threshold="0.5_1.6", rollout_rs="token_k3", rollout_rs_threshold=0.1
        )
        return loss

    batch = ragged_batch(prompts=5)
    batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"] + 0.3 * batch.batch["advantages"]
    gap = (batch.batch["old_log_probs"] - batch.batch["rollout_log_probs"]) * batch.batch["response_mask"]
    ratio = gap.sum(-1, keepdim=True).exp()
    kept = (ratio >= 0.5) & (ratio <= 1.6) & (gap.exp() - 1 - gap <= 0.1)
    assert 0 < int(kept.sum()) < kept.numel()
    compare(engines, torch.float64, batch, LAYOUTS, make, textbook(weights=ratio * kept))
    loss = make()
    loss.prepare(copy.copy(batch).select())
    assert {"rollout_is/ess", "rollout_is/masked", "rollout_rs/rejected", "mismatch/ppl_ratio"} <= set(loss.metrics())


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", [1.1, "0.7_1.2"])
def test_without_old_log_probs_the_policy_being_differentiated_weighs_as_old_ones_equal_to_it_do(
    engines, level, threshold
):
    def make():
        loss = make_loss("vanilla")
        loss.correction = RolloutCorrectionConfig(rollout_is=level, rollout_is_threshold=threshold)
        return loss

    batch, engine = ragged_batch(prompts=5), engines(torch.float64, LAYOUTS[0])
    now = engine.log_probs(batch, temperature=TEMPERATURE)["log_probs"]
    shift = 0.3 if level == "token" else 0.08
    batch.batch["rollout_log_probs"] = now + shift * batch.batch["advantages"] * batch.batch["response_mask"]
    batch.batch["old_log_probs"] = now.clone()
    before = make()
    wanted = gradient(engine, batch, before)
    without = copy.copy(batch).select([name for name in batch.batch if name != "old_log_probs"])
    for layout in LAYOUTS:
        inside = make()
        found = gradient(engines(torch.float64, layout), without, inside)
        assert float((found - wanted).norm() / wanted.norm()) < 1e-9, layout
        found = finish_importance_metrics(inside.metrics())
        assert found == pytest.approx(before.metrics(), rel=1e-5, abs=1e-6), layout
    plain = gradient(engine, without, make_loss("vanilla"))
    assert float((plain - wanted).norm() / wanted.norm()) > 1e-2
    assert 0 < before.metrics()["rollout_is/truncated" if threshold == 1.1 else "rollout_is/masked"] < 1


@pytest.mark.parametrize("beforehand", [True, False], ids=["with old log-probs", "in the update"])
def test_weights_are_of_what_was_sampled_from_after_filters_and_penalties(engines, beforehand):
    """`top_p` and others sample from less than the policy: the weights compare with that, not with the policy."""
    loss = make_loss("vanilla")
    loss.correction = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=1e6)
    batch, engine = ragged_batch(prompts=5), engines(torch.float64, LAYOUTS[0])
    now = engine.log_probs(batch, temperature=TEMPERATURE)["log_probs"]
    batch.batch["rollout_log_probs"] = now.clone()
    batch.batch["sampling_log_probs"] = now + 0.3 * batch.batch["advantages"].abs()
    kept = [name for name in batch.batch if beforehand or name != "old_log_probs"]
    batch = batch.select(kept)
    if beforehand:
        batch.batch["old_log_probs"] = now.clone()
        made = loss.prepare(copy.copy(batch).select()).batch["rollout_is_weights"]
        wanted = (now - batch.batch["sampling_log_probs"]).exp() * batch.batch["response_mask"]
        torch.testing.assert_close(made, wanted.to(made.dtype))
    found = gradient(engine, batch, loss)
    unfiltered = copy.copy(batch).select([name for name in kept if name != "sampling_log_probs"])
    unfiltered.batch["rollout_log_probs"] = batch.batch["sampling_log_probs"]
    wanted = gradient(engine, unfiltered, loss)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-9
    unfiltered.batch["rollout_log_probs"] = batch.batch["rollout_log_probs"]
    blind = gradient(engine, unfiltered, loss)
    assert float((blind - wanted).norm() / wanted.norm()) > 1e-2


def test_a_loss_that_chooses_tokens_in_each_micro_batch_would_be_seen(engines):
    """The tests above can fail: the same choice made anew per micro-batch gives another gradient."""
    batch = ragged_batch(prompts=5)

    class Forgetful(type(objective())):
        def __call__(self, micro, outputs):
            plain = micro.select([k for k in micro.batch if not k.startswith(("prepared_", "loss_", "mean_"))])
            plain.meta_info.pop("counts")  # of the mini-batch
            mini = super().prepare(plain)
            micro.batch["prepared_chosen"] = mini.batch["prepared_chosen"]
            return super().__call__(micro, outputs)

    def forgetful():
        loss = make_loss("clip_cov")
        loss.__class__ = Forgetful
        return loss

    whole = gradient(engines(torch.float64, LAYOUTS[0]), batch, make_loss("clip_cov"))
    part = gradient(engines(torch.float64, LAYOUTS[-1]), batch, forgetful())
    assert float((part - whole).norm() / whole.norm()) > 1e-3
