"""Whole updates against the textbook: gradients row by row in plain transformers, AdamW written out, in float64.

Every setting of optimizer, schedule, clipping, loss and temperature has an unusual value, so that one which is ignored
leaves other weights.
"""

from __future__ import annotations

import pytest
import torch
from plain import PlainAdamW, aggregated, flat_weights, plain_loss, plain_model, plain_outputs, rows_of
from textbook import ACTOR, CLIP, OPTIM, TEMPERATURE, actor, batch, critic, rates
from torch.nn.functional import pad

KL, ENTROPY = 0.2, 0.3


def adamw(model) -> PlainAdamW:
    betas = (OPTIM["betas"][0], OPTIM["betas"][1])
    return PlainAdamW(model, betas=betas, eps=OPTIM["eps"], decay=OPTIM["weight_decay"], clip=CLIP)


def test_the_actors_update_is_adamw_on_the_gradient_at_the_rollouts_temperature(tiny_model):
    """Two passes over two mini-batches of 4 prompts: 4 optimizer steps."""
    wanted = {
        "loss_agg_mode": "seq-mean-token-mean",
        "use_kl_loss": True,
        "kl_loss_coef": KL,
        "entropy_coeff": ENTROPY,
        "ppo_epochs": 2,
        "grad_clip": CLIP,
        **{f"optim.{name}": value for name, value in OPTIM.items()},
    }
    group, data = actor(tiny_model, {f"{ACTOR}.{k}": v for k, v in wanted.items()}, total_updates=4), batch()
    metrics = group.update_actor(data)
    model = plain_model(tiny_model)
    textbook, norms = adamw(model), []
    for step, rate in enumerate(rates(4)):
        part = data[list(range(8)) if step % 2 == 0 else list(range(8, 16))]
        outputs = plain_outputs(model, part, TEMPERATURE)
        loss = plain_loss(outputs, part, mode="seq-mean-token-mean", kl=KL, entropy=ENTROPY)
        norms.append(textbook.step(loss, rate))
    assert min(norms) > 2 * CLIP  # what is logged is the norm before it is bounded
    assert metrics["actor/grad_norm"] == pytest.approx(sum(norms) / 4, rel=1e-5)
    assert metrics["actor/lr"] == pytest.approx(sum(rates(4)) / 4)
    torch.testing.assert_close(flat_weights(group.worker.engine.module), flat_weights(model), rtol=0, atol=1e-6)


def test_the_critics_update_is_adamw_on_the_gradient_of_the_clipped_value_loss(tiny_model):
    wanted = {
        "loss_agg_mode": "seq-mean-token-sum",
        "cliprange_value": 0.3,
        "ppo_epochs": 2,
        "grad_clip": CLIP,
        **{f"optim.{name}": value for name, value in OPTIM.items()},
    }
    group, data = critic(tiny_model, {f"critic.{k}": v for k, v in wanted.items()}, total_updates=4), batch()
    metrics = group.update_critic(data)
    model = torch.nn.Module()
    model.decoder, model.head = plain_model(tiny_model).base_model, torch.nn.Linear(32, 1, dtype=torch.float64)
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    textbook, norms = adamw(model), []
    for step, rate in enumerate(rates(4)):
        part = data[list(range(8)) if step % 2 == 0 else list(range(8, 16))]
        width = part.batch["responses"].shape[1]
        values = torch.stack([_values(model, ids, length, width) for ids, length in rows_of(part)])
        old, returns = part.batch["values"], part.batch["returns"]
        near = old + (values - old).clamp(-0.3, 0.3)
        losses = 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)
        norms.append(textbook.step(aggregated(losses, part.batch["response_mask"], "seq-mean-token-sum"), rate))
    assert metrics["critic/grad_norm"] == pytest.approx(sum(norms) / 4, rel=1e-5) and min(norms) > 2 * CLIP
    torch.testing.assert_close(flat_weights(group.worker.engine.module), flat_weights(model), rtol=0, atol=1e-6)


def _values(model, ids: torch.Tensor, length: int, width: int) -> torch.Tensor:
    states = model.decoder(ids[None]).last_hidden_state[0, -length - 1 : -1]
    return pad(model.head(states)[:, 0], (0, width - length))


def test_all_log_probs_of_a_run_are_those_at_the_rollouts_temperature(tiny_model):
    """Of the policy, of its reference, and of one micro-batch (S0-120)."""
    group, data = actor(tiny_model, {}, reference=True), batch()
    with torch.no_grad():
        log_probs, entropy = plain_outputs(plain_model(tiny_model), data, TEMPERATURE)
    close = {"rtol": 0, "atol": 1e-6}
    ours = group.compute_log_prob(data).batch
    torch.testing.assert_close(ours["old_log_probs"], log_probs, **close)
    torch.testing.assert_close(ours["entropy"], entropy, **close)
    torch.testing.assert_close(group.compute_ref_log_prob(data).batch["ref_log_prob"], log_probs, **close)
    few = data[[1, 4, 5]]
    torch.testing.assert_close(group.worker.actor._forward_micro_batch(few), log_probs[[1, 4, 5]], **close)


def test_a_samples_own_log_probs_are_those_of_the_trainer_at_that_temperature(tiny_model):
    """What was sampled at 0.7 is scored at 0.7: the ratio of the first update is 1."""
    group, data = actor(tiny_model, {}), batch()
    prompts = data.select([], [])
    prompts.non_tensor_batch["raw_prompt_ids"] = _objects([ids[:-length].tolist() for ids, length in rows_of(data)])
    prompts.non_tensor_batch["seed"] = _objects(list(range(len(data))))
    made = group.generate_sequences(prompts)
    with torch.no_grad():
        log_probs, _ = plain_outputs(plain_model(tiny_model), made, TEMPERATURE)
    torch.testing.assert_close(made.batch["rollout_log_probs"].double(), log_probs, rtol=0, atol=1e-5)


def _objects(values: list):
    import numpy as np

    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out
