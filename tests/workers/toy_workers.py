"""Workers that tell what reached them and how they lie over the ranks, for tests on several processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from textbook import ACTOR, CPU, ROLLOUT, batch, ppo_config

from posttrain.batch.columns import Holder, keep
from posttrain.controller.group import WorkerGroup, all_of, largest, register, to_all, to_first
from posttrain.controller.pool import Workers
from posttrain.engine.ranks import join_ranks, leave_ranks, neighbours
from posttrain.errors import UserError
from posttrain.models.loading import load_tokenizer
from posttrain.protocol import DataProto
from posttrain.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker, RolloutWorker
from posttrain.workers.update_plan import by_groups, in_row_order

STEPS = 2


class Toy:
    """Answers with what it was given, changed in place."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.pair = neighbours(config.pairs) if config else None

    @register(by_groups, in_row_order)
    def doubled(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"twice": data.batch["x"].mul_(2)})

    @register(by_groups, lambda results, calls: [calls.rows, results], team=lambda config: config.pairs)
    def summed_in_pairs(self, data: DataProto) -> tuple[int, int]:
        """(this rank, the sum of what its team was given): ranks of a team wait for each other."""
        both = data.batch["x"].sum()
        torch.distributed.all_reduce(both, group=self.pair)
        return torch.distributed.get_rank(), int(both)

    @register(to_all, lambda results, calls: results, team=lambda config: config.pairs)
    def refuse_second(self) -> int:
        """The second of a pair cannot."""
        if torch.distributed.get_rank() % 2:
            self.refuse()
        return torch.distributed.get_rank()

    @register(to_all, lambda results, calls: results)
    def plus_rank(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.add_(torch.distributed.get_rank() + 1)

    @register(to_all)
    def refuse(self) -> None:
        raise UserError("this cannot be had")

    @register(to_all, lambda results, calls: results)
    def process(self) -> int:
        return os.getpid()

    @register(to_all, lambda results, calls: results)
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @register(to_all)
    def refuse_first(self, file: Path) -> None:
        """Rank 0 cannot; the others are at it until there is this file, or for five seconds."""
        if torch.distributed.get_rank() == 0:
            self.refuse()
        end = time.monotonic() + 5
        while not (file.exists() or time.monotonic() > end):
            time.sleep(0.01)
        self.found = file.exists()

    @register(to_all)
    def found_it(self) -> bool:
        return self.found

    @register(to_all, all_of)
    def meet(self) -> int:
        """All ranks wait for each other."""
        count = torch.ones(1)
        torch.distributed.all_reduce(count)
        return int(count)

    @register(to_all)
    def lose_touch(self, words: str = "") -> None:
        """Rank 0 cannot talk to the others at once; with `words` rank 1 prints them, and dies only then."""
        if torch.distributed.get_rank() == 0:
            raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer.")
        if words:
            print(words, flush=True)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)

    @register(to_all, all_of)
    def keep_numbers(self, count: int) -> Holder:
        return keep({"numbers": [np.arange(count)]})

    @register(to_first)
    def sum_of(self, holder: Holder) -> int:
        return int(holder.get()["numbers"][0].sum())

    @register(to_all)
    def nap(self, seconds: float) -> None:
        time.sleep(seconds)


class Join:
    """A process becomes one of `count` ranks, whatever it was before."""

    def __init__(self, rank: int, count: int, address: str) -> None:
        leave_ranks()
        join_ranks(rank, count, address, CPU, timeout_s=300)


class OneEngine(RolloutWorker):
    """A worker that holds an engine with others; tells how much of it, and can be led astray."""

    @register(to_all, all_of)
    def held(self) -> dict[str, int]:
        """Bytes of weights here, of the whole model's here, and of the cache for a token."""
        engine: Any = self.engine
        storages = {weight.untyped_storage() for weight in engine.decoder.arena.named.values()}
        storages |= {part.weight.untyped_storage() for layer in engine.decoder.arena.layers for part in layer.values()}
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        whole = sum(weight.nbytes for weight in engine.decoder.module.parameters())
        keys = sum(cache.nbytes for layer in engine.pool.layers.values() for cache in layer)
        return {"weights": sum(sizes.values()), "whole": whole, "cache": keys // engine.pool.size}

    @register(to_all)
    def wake_weights(self) -> None:
        self.engine.wake("weights")

    @register(to_all)
    def slip(self) -> None:
        """Rank 1 believes that it made something else."""
        self._made += torch.distributed.get_rank()

    @register(to_first)
    def engine_ranks(self) -> int:
        return self.engine.ranks


class Spoiled(ActorRolloutRefWorker):
    """Rank 1 loses a weight of its own at the first sync."""

    @register(to_all, largest)
    def sync_weights(self, version: int) -> dict[str, float]:
        engine: Any = self.rollout.engine
        load = engine.load_weights

        def lossy(weights: Any, version: int) -> None:
            load(weights, version)
            if torch.distributed.get_rank() == 1:
                engine.decoder.layers[1].feed.down.weight[0].zero_()

        engine.load_weights = lossy
        return super().sync_weights(version)


class TwoGenerate(ActorRolloutRefWorker):
    """Only the first two ranks have an engine."""

    @register(to_all, largest)
    def sync_weights(self, version: int) -> dict[str, float]:
        assert hasattr(self.rollout, "engine") == (torch.distributed.get_rank() < 2)
        return super().sync_weights(version)


def layout(engine: Any) -> tuple[tuple[int, ...], int]:
    """(copies of the model x ranks that hold one, or the latter alone; ranks that share a row's tokens)."""
    ranks = engine.settings.ranks
    return (tuple(ranks.mesh.shape), ranks.sequence_size) if ranks else ((1,), 1)


class ActorAndReference(ActorRolloutRefWorker):
    """Tells how it lies over the ranks."""

    @register(to_all)
    def layouts(self) -> list[Any]:
        return [layout(engine) for engine in (self.engine, self.reference.engine) if engine]


class Critic(CriticWorker):
    @register(to_all)
    def layouts(self) -> list[Any]:
        return [layout(self.engine)]


def group_of(workers: Workers, model, settings: dict[str, Any], *, value: bool, **named: Any) -> WorkerGroup:
    config = ppo_config(
        model, {f"{ACTOR}.optim.lr": 1e-3, "critic.optim.lr": 1e-3, f"{ROLLOUT}.name": "hf", **settings}
    )
    if value:
        group = workers.create("critic", Critic, config, CPU, total_updates=40, **named)
    else:
        tokenizer = load_tokenizer(config.actor_rollout_ref.model)
        group = workers.create("actor", ActorAndReference, config, tokenizer, CPU, total_updates=40, **named)
    group.init_model()
    return group


def updates(group: WorkerGroup, *, value: bool, steps: int = STEPS) -> tuple[list[dict], torch.Tensor]:
    """Metrics of `steps` batches, several optimizer steps each, and what the model then gives for the last of them."""
    data, metrics = batch(), []
    for step in range(1, steps + 1):
        data.meta_info["step"] = step
        metrics.append(group.update_critic(data) if value else group.update_actor(data))
    if value:
        return metrics, group.compute_values(data).batch["values"]
    return metrics, group.compute_log_prob(data).batch["old_log_probs"]
