"""verl's actor around a module and an optimizer of your own: log-probs of responses, and the update on a batch.

For code that builds such an actor itself. A run trains through `verl.workers.fsdp_workers`, whose actor is posttrain's,
with packed rows and a loss normalised over the whole mini-batch; here too a mini-batch gives the same gradient however
it is cut into passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty
from verl.utils.py_functional import append_to_dict
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits
from verl.workers.config import actor_view

__all__ = ["DataParallelPPOActor"]
_NEEDED = ("responses", "response_mask", "input_ids", "attention_mask", "old_log_probs", "advantages")
_OPTIONAL = ("position_ids", "ref_log_prob", "rollout_is_weights")


class DataParallelPPOActor:
    """Without an optimizer it is a reference policy."""

    def __init__(self, config: Any, actor_module: torch.nn.Module, actor_optimizer: Any = None) -> None:
        self.config, self.actor_module, self.actor_optimizer = config, actor_module, actor_optimizer

    def compute_log_prob(self, data: Any, calculate_entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(log-probs, entropy or None) of the responses, (rows, response length) each."""
        self.actor_module.eval()
        temperature = data.meta_info["temperature"]
        parts = []
        with torch.no_grad():
            for part in data.split(max(1, int(data.meta_info.get("micro_batch_size") or len(data)))):
                parts.append(self._forward_micro_batch(part.batch, temperature, calculate_entropy))
        entropies = [entropy for entropy, _ in parts if entropy is not None]
        return torch.cat([log_prob for _, log_prob in parts]), torch.cat(entropies) if entropies else None

    def update_policy(self, data: Any) -> dict[str, list[Any]]:
        """`ppo_epochs` passes of optimizer steps over mini-batches of `ppo_mini_batch_size` rows; gives the metrics."""
        self.actor_module.train()
        metrics: dict[str, list[Any]] = {}
        for _ in range(self.config.ppo_epochs):
            for mini in data.split(self.config.ppo_mini_batch_size):
                self.actor_optimizer.zero_grad()
                for part in self._parts(mini):
                    append_to_dict(metrics, self._accumulate(part.batch, mini.batch, data.meta_info["temperature"]))
                append_to_dict(metrics, {"actor/grad_norm": float(self._optimizer_step())})
        self.actor_optimizer.zero_grad()
        return metrics

    def _parts(self, mini: Any) -> Iterator[Any]:
        rows = self.config.ppo_micro_batch_size_per_gpu or len(mini)
        yield from mini.select(batch_keys=[name for name in (*_NEEDED, *_OPTIONAL) if name in mini.batch]).split(rows)

    def _accumulate(self, part: Any, mini: Any, temperature: float) -> dict[str, Any]:
        """Add the part's share of the mini-batch's gradient."""
        config, mask = self.config, part["response_mask"]
        counts = {
            "dp_size": 1,
            "batch_num_tokens": mini["response_mask"].sum(),
            "global_batch_size": len(mini["response_mask"]),
            "loss_scale_factor": config.loss_scale_factor,
        }
        entropy, log_prob = self._forward_micro_batch(part, temperature, config.entropy_coeff != 0)
        lose = get_policy_loss_fn(config.policy_loss.loss_mode)
        loss, metrics = lose(
            old_log_prob=part["old_log_probs"],
            log_prob=log_prob,
            advantages=part["advantages"],
            response_mask=mask,
            loss_agg_mode=config.loss_agg_mode,
            config=actor_view(config, counts),
            rollout_is_weights=part.get("rollout_is_weights", None),
        )
        metrics = {**metrics, "actor/pg_loss": loss.detach().item()}
        if entropy is not None:
            bonus = agg_loss(entropy, mask, config.loss_agg_mode, **counts)
            loss, metrics["actor/entropy"] = loss - config.entropy_coeff * bonus, bonus.detach().item()
        if config.use_kl_loss:
            kl = agg_loss(
                kl_penalty(log_prob, part["ref_log_prob"], config.kl_loss_type), mask, config.loss_agg_mode, **counts
            )
            loss, metrics["actor/kl_loss"] = loss + config.kl_loss_coef * kl, kl.detach().item()
            metrics["actor/kl_coef"] = config.kl_loss_coef
        loss.backward()
        return metrics

    def _forward_micro_batch(
        self, micro_batch: Any, temperature: float, calculate_entropy: bool = False
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(entropy or None, log-probs) of the responses."""
        responses = micro_batch["responses"]
        places = {"position_ids": micro_batch["position_ids"]} if "position_ids" in micro_batch.keys() else {}
        made = self.actor_module(
            input_ids=micro_batch["input_ids"], attention_mask=micro_batch["attention_mask"], use_cache=False, **places
        )
        logits = made.logits[:, -responses.shape[1] - 1 : -1].float() / temperature
        return entropy_from_logits(logits) if calculate_entropy else None, logprobs_from_logits(logits, responses)

    def _optimizer_step(self) -> torch.Tensor:
        """One step with the gradient's norm bounded; a gradient that is not finite is dropped."""
        norm = torch.nn.utils.clip_grad_norm_(self.actor_module.parameters(), self.config.grad_clip)
        if torch.isfinite(norm):
            self.actor_optimizer.step()
        else:
            print(f"WARN: grad_norm is not finite: {norm}; the step is left out")
            self.actor_optimizer.zero_grad()
        return norm
