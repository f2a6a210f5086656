"""Replay: from a checkpoint (or the first weights) the recorded batches are applied again, up to one step's update.

On the same device with the same number of threads losses are bitwise identical. Tensors can be watched on the way:
fields of the batch, outputs of modules, weights after the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posttrain.algorithms import get_adv_estimator
from posttrain.checkpoint.manager import CheckpointManager, restore_rng
from posttrain.config import load_config
from posttrain.models.loading import load_tokenizer
from posttrain.protocol import DataProto
from posttrain.tracking.loggers import read_metrics
from posttrain.tracking.rundir import batch_folder, read_facts
from posttrain.trainer.run.process import open_workers, prepare_torch
from posttrain.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker
from posttrain.workers.groups import ColocatedGroup, CriticGroup
from posttrain.workers.roles import pick_device

# (name, tensor): `batch/advantages`, `actor/model.layers.0.mlp` (an output), `after/actor/model.norm.weight`.
Watch = Callable[[str, torch.Tensor], object]
COMPARED = ("policy_loss", "actor/loss", "actor/grad_norm", "kl_loss", "critic/vf_loss", "critic/grad_norm")


@dataclass
class Replayed:
    """One update made again."""

    step: int
    metrics: dict[str, float]
    recorded: dict[str, float]

    @property
    def differing(self) -> dict[str, tuple[float, float]]:
        """Name -> (recorded, now) of the losses and norms that are not bitwise identical."""
        names = [name for name in COMPARED if name in self.metrics and name in self.recorded]
        pairs = {name: (self.recorded[name], self.metrics[name]) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def replay(run: Path, start: int, step: int, watch: Watch | None = None) -> Iterator[Replayed]:
    """The updates from the checkpoint of step `start` (0: the first weights) up to `step`; only the last is watched."""
    facts = read_facts(run / "batches")
    assert facts is not None
    with ExitStack() as stack:
        actor, critic = _workers(stack, run, facts, start)
        recorded = {int(line["step"]): line for line in read_metrics(run / "metrics.jsonl")}
        for number in range(start + 1, step + 1):
            batch = DataProto.load_from_disk(batch_folder(run / "batches", number))
            watching = watch if number == step else None
            groups = {"actor": actor} | ({"critic": critic} if critic else {})
            # In the order of the loop: the critic learns first.
            with _watch_update(groups, batch, watching):
                metrics = dict(critic.update_critic(batch)) if critic else {}
                # As in the run: during warm-up the actor is not updated.
                if number > facts["critic_warmup"]:
                    metrics |= actor.update_actor(batch)
            yield Replayed(number, metrics, recorded.get(number, {}))


def _checkpoints(run: Path) -> CheckpointManager:
    return CheckpointManager(run / "checkpoints", keep=None, on_note=lambda text: None)


def _workers(
    stack: ExitStack, run: Path, facts: dict[str, Any], start: int
) -> tuple[ColocatedGroup, CriticGroup | None]:
    """Actor and critic as the run had them after step `start`."""
    config = load_config(facts["config"]).config
    # Recorded batches need no rollout workers.
    config.actor_rollout_ref.rollout.n_workers = 0
    device = pick_device(config.trainer.device)
    prepare_torch(config.trainer, device)
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    workers = stack.enter_context(open_workers(config, device, config.actor_rollout_ref.model.external_lib))
    made = workers.create("actor", ActorRolloutRefWorker, config, tokenizer, device, total_updates=facts["updates"])
    actor = ColocatedGroup(made)
    actor.init_model()
    critic = None
    if get_adv_estimator(config.algorithm.adv_estimator).needs_critic:
        updates, tokens = facts["critic_updates"], min(len(tokenizer), actor.vocabulary())
        made = workers.create("critic", CriticWorker, config, device, total_updates=updates, tokens=tokens)
        critic = CriticGroup(made)
        critic.init_model()
    if start:
        manager = _checkpoints(run)
        path = manager.path_of(start)
        actor.load(manager.role_folder(path, "actor"))
        if critic:
            critic.load(manager.role_folder(path, "critic"))
        # The run's update began with the generators in this state.
        restore_rng(manager.load_rng(path))
    return actor, critic


@contextmanager
def _watch_update(groups: dict[str, Any], batch: DataProto, watch: Watch | None) -> Iterator[None]:
    """Inside, `watch` sees the batch's tensors and every module's output; afterwards the weights."""
    if watch is None:
        yield
        return
    for name, tensor in batch.batch.items():
        watch(f"batch/{name}", tensor)
    modules = {role: module for role, group in groups.items() if (module := _module(group)) is not None}
    handles = [
        part.register_forward_hook(lambda _, __, out, name=f"{role}/{name}", to=watch: _show(to, name, out))
        for role, module in modules.items()
        for name, part in module.named_modules()
        if name
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for role, module in modules.items():
        for name, weight in module.named_parameters():
            watch(f"after/{role}/{name}", weight.detach())


def _module(group: Any) -> torch.nn.Module | None:
    """The trained module where it lives in this process."""
    worker = getattr(group, "worker", None)
    return getattr(getattr(worker, "engine", None), "module", None)


def _show(watch: Watch, name: str, out: Any) -> None:
    first = out[0] if isinstance(out, tuple | list) and out else out
    if isinstance(first, torch.Tensor):
        watch(name, first.detach())
