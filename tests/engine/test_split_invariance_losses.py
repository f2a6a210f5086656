"""No split changes the gradient of any policy loss: 16 rows in 1, 2, 4, 8, 16 micro-batches, packed and padded."""

import copy

import pytest
import torch
from engine_tools import objective, ragged_batch

from posttrain.algorithms import AGGREGATION_MODES
from posttrain.algorithms.registry import POLICY_LOSSES
from posttrain.config.actor import PolicyLossConfig
from posttrain.config.algorithm import RolloutCorrectionConfig

LIMITS = {torch.float32: 1e-6, torch.float64: 1e-12}
LAYOUTS = [
    {"max_rows": rows, "pack": pack}
    for rows, pack in ((16, True), (16, False), (8, True), (4, False), (2, True), (1, False), (1, True))
]
FEW = [LAYOUTS[index] for index in (0, 3, 6)]


@pytest.fixture(scope="module")
def engines(base_model):
    """One engine per type and layout for the whole file: building them would take most of its time."""
    from posttrain.config.optim import OptimConfig
    from posttrain.engine.fsdp import EngineSettings, FSDPEngine

    built = {}

    def engine(dtype, layout) -> FSDPEngine:
        key = (dtype, *layout.values())
        if key not in built:
            settings = EngineSettings(device=torch.device("cpu"), optim=OptimConfig(lr=1e-3), grad_clip=1e9, **layout)
            built[key] = FSDPEngine(base_model(dtype), settings)
        return built[key]

    return engine


def gradient(engine, batch, loss) -> torch.Tensor:
    engine.optimizer.adam.zero_grad(set_to_none=True)
    assert engine._backward(loss.prepare(copy.copy(batch).select()), loss, 1.0)
    return torch.cat([master.grad.flatten() for master in engine.optimizer.masters])


def make_loss(name: str, mode: str = "token-mean"):
    own = PolicyLossConfig(loss_mode=name, clip_cov_ratio=0.1, clip_cov_lb=0.2, kl_cov_ratio=0.1)
    return objective(loss_agg_mode=mode, policy_loss=own)


def compare(engines, dtype, batch, layouts, make) -> None:
    whole_loss = make()
    whole = gradient(engines(dtype, layouts[0]), batch, whole_loss)
    assert whole.norm() > 1e-4
    for layout in layouts[1:]:
        loss = make()
        part = gradient(engines(dtype, layout), batch, loss)
        assert float((part - whole).norm() / whole.norm()) < LIMITS[dtype], layout
        for metric, value in whole_loss.metrics().items():
            assert loss.metrics()[metric] == pytest.approx(value, rel=1e-5, abs=1e-6), (layout, metric)


@pytest.mark.parametrize("dtype", LIMITS, ids=["float32", "float64"])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_gradient_of_every_loss_is_the_same_in_every_split(engines, name, dtype):
    compare(engines, dtype, ragged_batch(dtype=dtype, prompts=5), LAYOUTS, lambda: make_loss(name))


@pytest.mark.parametrize("mode", [mode for mode in AGGREGATION_MODES if mode != "token-mean"])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_gradient_of_every_loss_and_aggregation_is_the_same_in_every_split(engines, name, mode):
    compare(engines, torch.float64, ragged_batch(prompts=5), FEW, lambda: make_loss(name, mode))


def test_the_correction_and_its_diagnostics_are_the_same_in_every_split(engines):
    def make():
        loss = make_loss("vanilla")
        loss.correction = RolloutCorrectionConfig(
            rollout_is="sequence", rollout_is_threshold="0.001_50.0", rollout_rs="token_k3", rollout_rs_threshold=20.0
        )
        return loss

    batch = ragged_batch(prompts=5)
    batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"] + 0.3 * batch.batch["advantages"]
    compare(engines, torch.float64, batch, LAYOUTS, make)
    loss = make()
    loss.prepare(copy.copy(batch).select())
    assert {"rollout_is/ess", "rollout_is/masked", "rollout_rs/rejected", "mismatch/ppl_ratio"} <= set(loss.metrics())


def test_a_loss_that_chooses_tokens_in_each_micro_batch_would_be_seen(engines):
    """The tests above can fail: the same choice made anew per micro-batch gives another gradient."""
    batch = ragged_batch(prompts=5)

    class Forgetful(type(objective())):
        def __call__(self, micro, outputs):
            mini = super().prepare(
                micro.select([k for k in micro.batch if not k.startswith(("prepared_", "loss_", "mean_"))])
            )
            micro.batch["prepared_chosen"] = mini.batch["prepared_chosen"]
            return super().__call__(micro, outputs)

    def forgetful():
        loss = make_loss("clip_cov")
        loss.__class__ = Forgetful
        return loss

    whole = gradient(engines(torch.float64, LAYOUTS[0]), batch, make_loss("clip_cov"))
    part = gradient(engines(torch.float64, LAYOUTS[-1]), batch, forgetful())
    assert float((part - whole).norm() / whole.norm()) > 1e-3
