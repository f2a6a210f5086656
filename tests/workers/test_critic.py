"""The critic: no split changes its gradient, and every one of its settings has its effect."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))
from engine_tools import ragged_batch

from posttrain.algorithms import AGGREGATION_MODES
from posttrain.checkpoint import CheckpointManager
from posttrain.config.root import PPOConfig
from posttrain.config.schema import assign
from posttrain.controller.pool import LocalWorkerGroup
from posttrain.errors import UserError
from posttrain.protocol import DataProto
from posttrain.workers.critic.dp_critic import prepare_values
from posttrain.workers.fsdp_workers import CriticWorker
from posttrain.workers.measures import Measures

CPU = torch.device("cpu")
LIMITS = {"float32": 1e-6, "float64": 1e-12}
LAYOUTS: list[dict[str, Any]] = [
    {"critic.ppo_micro_batch_size_per_gpu": 1},
    {"critic.ppo_micro_batch_size_per_gpu": 3},
    {"critic.ppo_max_token_len_per_gpu": 40},
    {"critic.model.use_remove_padding": False},
    {"critic.model.use_remove_padding": False, "critic.ppo_micro_batch_size_per_gpu": 2},
    {"critic.model.enable_gradient_checkpointing": True, "critic.ppo_micro_batch_size_per_gpu": 4},
]


@pytest.fixture
def critic(tiny_model):
    """`critic({key: value})`: a critic of these settings with a head that is not zero."""

    def make(settings: dict[str, Any] | None = None, **named: Any) -> LocalWorkerGroup:
        config = PPOConfig()
        base = {
            "actor_rollout_ref.model.path": str(tiny_model),
            "actor_rollout_ref.model.dtype": "float64",
            "actor_rollout_ref.rollout.n": 2,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
            "critic.optim.lr": 1e-3,
            "critic.grad_clip": 1e9,
        }
        for key, value in {**base, **(settings or {})}.items():
            assign(config, key, value)
        group = LocalWorkerGroup(CriticWorker(config, CPU, **named))
        group.init_model()
        head = group.worker.engine.module.value_head
        with torch.no_grad():
            values = torch.linspace(-1, 1, head.weight.numel(), dtype=torch.float64)
            head.weight.copy_(values.view_as(head.weight).to(head.weight.dtype))
        return group

    return make


def batch(dtype: torch.dtype = torch.float64) -> DataProto:
    """16 ragged rows, two to a prompt, with old values and returns."""
    data = ragged_batch(dtype=dtype, prompts=8)
    generator = torch.Generator().manual_seed(3)
    shape = data.batch["responses"].shape
    for name in ("values", "returns"):
        data.batch[name] = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    data.meta_info["step"] = 1
    return data


def prepared(worker: Any, data: DataProto) -> DataProto:
    mode, longest = worker.config.critic.loss_agg_mode, worker.config.data.max_response_length
    return prepare_values(copy.copy(data).select(), mode, longest)


def gradient(group: LocalWorkerGroup, data: DataProto) -> tuple[torch.Tensor, dict[str, float]]:
    """The flat gradient of one mini-batch, and the metrics that its micro-batches added up to."""
    worker = group.worker
    worker.critic.measures = Measures()
    worker.engine.runner.gradients(prepared(worker, data), worker.critic._loss, 1.0)
    flat = torch.cat([master.grad.flatten() for master in worker.engine.optimizer.masters])
    return flat, worker.critic.measures.numbers()


def weights(group: LocalWorkerGroup) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in group.worker.engine.module.parameters()]).clone()


@pytest.mark.parametrize(
    ("mode", "dtype"), [*((mode, "float64") for mode in AGGREGATION_MODES), ("token-mean", "float32")]
)
def test_no_split_changes_the_gradient_of_the_value_loss(critic, mode, dtype):
    common = {"actor_rollout_ref.model.dtype": dtype, "critic.loss_agg_mode": mode}
    data = batch(getattr(torch, dtype))
    whole, metrics = gradient(critic(common), data)
    assert whole.norm() > 1e-3 and metrics["critic/vf_loss"] > 0 and 0 < metrics["critic/vf_clipfrac"] < 1
    for layout in LAYOUTS:
        part, own = gradient(critic({**common, **layout}), data)
        assert float((part - whole).norm() / whole.norm()) < LIMITS[dtype], layout
        assert own == pytest.approx(metrics, rel=1e-5, abs=1e-6), layout


def test_seq_mean_token_sum_norm_divides_by_the_longest_response_that_is_allowed(critic):
    """By data.max_response_length, not by what happens to be the longest of a batch."""
    mode, data = "seq-mean-token-sum-norm", batch()
    found = {}
    for limit in (20, 40):
        settings = {"critic.loss_agg_mode": mode, "data.max_response_length": limit}
        found[limit] = gradient(critic(settings), data)
        mask = data.batch["response_mask"]
        weights = prepared(critic(settings).worker, data).batch["loss_weights"]
        torch.testing.assert_close(weights, (mask / (limit * len(mask))).to(weights.dtype))
    torch.testing.assert_close(found[20][0], 2 * found[40][0])
    assert found[20][1]["critic/vf_loss"] == pytest.approx(2 * found[40][1]["critic/vf_loss"])


def test_a_loss_that_divides_by_its_own_rows_would_be_seen(critic):
    def wrong(layout):
        group = critic(layout)
        right = group.worker.critic._loss
        group.worker.critic._loss = lambda micro, outputs: right(micro, outputs) * 16 / len(micro)
        return gradient(group, batch())[0]

    whole, part = wrong({}), wrong({"critic.ppo_micro_batch_size_per_gpu": 2})
    assert float((part - whole).norm() / whole.norm()) > 0.1


def test_values_are_those_before_each_response_token(critic):
    group, data = critic(), batch()
    values = group.compute_values(data).batch["values"]
    module = group.worker.engine.module
    for row in range(0, 16, 5):
        mask = data.batch["attention_mask"][row].bool()
        length = int(mask[-values.shape[1] :].sum())
        with torch.no_grad():
            hidden = module.base_model(data.batch["input_ids"][row][mask][None]).last_hidden_state[0]
            plain = module.value_head(hidden).squeeze(-1)
        torch.testing.assert_close(values[row, :length], plain[-length - 1 : -1].float().double(), rtol=0, atol=1e-6)
        assert not values[row, length:].any()


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, 1),
        ({"actor_rollout_ref.actor.ppo_epochs": 3}, 3),
        ({"actor_rollout_ref.actor.ppo_epochs": 3, "critic.ppo_epochs": 2}, 2),
        ({"actor_rollout_ref.actor.ppo_mini_batch_size": 2}, 4),
        ({"actor_rollout_ref.actor.ppo_mini_batch_size": 2, "critic.ppo_mini_batch_size": 4}, 2),
        ({"critic.ppo_epochs": 2, "critic.ppo_mini_batch_size": 3}, 6),
    ],
)
def test_steps_are_passes_times_mini_batches_and_the_actors_where_unset(critic, settings, steps):
    group = critic(settings)
    assert group.update_critic(batch())["critic/optimizer_steps"] == steps
    assert group.worker.engine.optimizer.steps_done == steps


def test_a_value_beyond_the_clip_range_gets_no_gradient_towards_its_return(critic):
    data = batch()
    values = critic().compute_values(data).batch["values"]
    data.batch["values"] = values - 1.0  # every value has moved up by 1 and should go on
    data.batch["returns"] = values + 5.0
    clipped, metrics = gradient(critic({"critic.cliprange_value": 0.2}), data)
    free, wide = gradient(critic({"critic.cliprange_value": 2.0}), data)
    assert metrics["critic/vf_clipfrac"] == pytest.approx(1.0) and not clipped.any()
    assert metrics["critic/vf_loss"] == pytest.approx(0.5 * 5.8**2) and wide["critic/vf_loss"] == pytest.approx(
        0.5 * 25
    )
    assert wide["critic/vf_clipfrac"] == 0 and free.norm() > 1e-3


def test_gradients_are_clipped_to_the_critics_own_norm(critic):
    free, small = (
        critic(),
        critic({"critic.grad_clip": 1e-6, "critic.optim.weight_decay": 0.0, "critic.optim.eps": 1.0}),
    )
    before = weights(small)
    norms = [group.update_critic(batch())["critic/grad_norm"] for group in (free, small)]
    assert norms[0] == pytest.approx(norms[1]) and norms[0] > 1e-2  # what is logged is the norm before clipping
    assert float((weights(small) - before).norm()) == pytest.approx(1e-3 * 1e-6, rel=0.01)


def test_rate_and_schedule_are_the_critics_own(critic):
    settings = {"critic.optim.lr": 4e-3, "critic.optim.lr_scheduler_type": "linear", "critic.ppo_mini_batch_size": 2}
    group = critic({**settings, "actor_rollout_ref.actor.optim.lr": 1.0}, total_updates=4)
    assert group.update_critic(batch())["critic/lr"] == pytest.approx(4e-3 * (1 + 0.75 + 0.5 + 0.25) / 4)


def test_shuffling_changes_the_mini_batches_and_repeats_itself(critic):
    def after(**settings: Any) -> torch.Tensor:
        group = critic({"critic.ppo_mini_batch_size": 2, **{f"critic.{k}": v for k, v in settings.items()}})
        group.update_critic(batch())
        return weights(group)

    assert torch.equal(after(shuffle=True), after(shuffle=True)) and not torch.equal(after(shuffle=True), after())


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(critic):
    group, data = critic(), batch()
    data.batch["returns"][0, 0] = float("inf")
    before = weights(group)
    metrics = group.update_critic(data)
    assert metrics["critic/bad_steps"] == 1 and torch.equal(weights(group), before)


def test_offloading_moves_weights_and_moments_and_changes_no_number(critic):
    both = {"critic.fsdp_config.param_offload": True, "critic.fsdp_config.optimizer_offload": True}
    plain, moved = critic(), critic(both)
    seen: list[str] = []
    engine = moved.worker.engine
    to, move = engine.module.to, engine.optimizer.move
    engine.module.to = lambda device: seen.append(f"weights {device}") or to(device)
    engine.optimizer.move = lambda device: seen.append(f"moments {device}") or move(device)
    for group in (plain, moved):
        group.compute_values(batch())
        group.update_critic(batch())
    values, update = ["weights cpu", "weights cpu", "moments cpu"], ["weights cpu", "moments cpu"] * 2
    assert seen == values + update
    assert torch.equal(weights(plain), weights(moved))


def test_what_is_saved_continues_exactly(critic, tmp_path):
    straight, stopped = critic(), critic()
    for group in (straight, stopped):
        group.update_critic(batch())
    resumed, manager = critic(), CheckpointManager(tmp_path)
    path = manager.save(1, tensors={"critic": stopped.save}, state={}, rng={})
    resumed.load(manager.role_folder(path, "critic"))
    for group in (straight, resumed):
        group.update_critic(batch())
    assert torch.equal(weights(straight), weights(resumed))
    assert resumed.worker.engine.optimizer.steps_done == 2


def test_another_folder_serves_and_does_not_get_the_policys_overrides(critic, rm_same, tiny_model, tmp_path):
    """A reward model is a usual start; a key that only the policy's family knows must not reach it."""
    overrides = {"actor_rollout_ref.model.override_config": {"use_sliding_window": False, "sliding_window": None}}
    group = critic({"critic.model.path": str(rm_same), **overrides}, tokens=261)
    own = torch.nn.Module.state_dict(group.worker.engine.module)["base_model.layers.0.mlp.up_proj.weight"]
    from safetensors.torch import load_file

    assert torch.equal(own.float(), load_file(rm_same / "model.safetensors")["model.layers.0.mlp.up_proj.weight"])
    gpt = tmp_path / "gpt"
    _write_gpt2(gpt, vocabulary=261)
    assert (
        critic({"critic.model.path": str(gpt), **overrides}, tokens=261).compute_values(batch()).batch["values"].any()
    )


def test_a_critic_that_lacks_some_of_the_policys_tokens_is_refused(critic, tmp_path):
    _write_gpt2(tmp_path / "small", vocabulary=100)
    with pytest.raises(UserError, match=r"critic.model.path=.*knows 100 tokens, but the policy 261"):
        critic({"critic.model.path": str(tmp_path / "small")}, tokens=261)


def _write_gpt2(folder: Path, *, vocabulary: int) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, n_embd=32, n_layer=1, n_head=2, n_positions=64)).save_pretrained(
        folder
    )
