#!/usr/bin/env python3
"""What one training step costs the driver: bytes held, sent and received, and CPU seconds, by stage.

    python scripts/measure_data_plane.py [--prompts 32] [--tokens 32768] [--workers 64] [--teams 1] [--scale 16]

One process plays the driver and all workers. The driver's code is the real one (`Experience`, `RewardManager`, the
spreading, planning and joining of `workers/`, advantages, metrics), and so are the messages: arguments and results are
packed as for Ray, and rows lie in a real Ray store. The workers invent their answers: their time does not count.
`--teams 8` lets 8 neighbouring workers compute the same sequences together. `--no-store` has all rows travel through
the driver, `--no-texts` has a run without reward functions, `--samples` a step whose samples are written. `--scale`
multiplies the figures, where only a part of the prompts was measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from needs import need

from posttrain.batch.columns import has_store, use_store
from posttrain.batch.compact import keep_rows
from posttrain.config.root import PPOConfig
from posttrain.config.schema import assign
from posttrain.controller.group import Future, WorkerGroup
from posttrain.controller.rank_host import pack, put_block, size_of, unpack
from posttrain.engine.facts import EngineFacts
from posttrain.models.embedded import byte_tokenizer
from posttrain.protocol import DataProto
from posttrain.rewards.types import RewardResult
from posttrain.rollout.base import Output
from posttrain.rollout.stored import keep_outputs
from posttrain.texts import texts_of
from posttrain.tracking.metrics import step_metrics
from posttrain.tracking.samples import sample_table
from posttrain.trainer.ppo.advantages import compute_advantage
from posttrain.trainer.ppo.experience import Experience
from posttrain.trainer.ppo.reward import RewardManager
from posttrain.trainer.ppo.sample_writer import SampleWriter, packed_samples
from posttrain.workers.fsdp_workers import ActorRolloutRefWorker
from posttrain.workers.groups import ColocatedGroup
from posttrain.workers.measures import ROW, Measures, StoredStats, TokenStats
from posttrain.workers.update_plan import batch_of

GB = 1e9
PROMPT_TOKENS = 512


class Meter:
    """Seconds and bytes of the driver by stage; `worker` is time of others."""

    def __init__(self) -> None:
        self.seconds, self.sent, self.received = (defaultdict[str, float](float) for _ in range(3))
        self.stage, self._others = "", 0.0

    @contextmanager
    def of(self, stage: str) -> Iterator[None]:
        self.stage, self._others = stage, 0.0
        begun = time.thread_time()
        yield
        self.seconds[stage] += time.thread_time() - begun - self._others

    @contextmanager
    def worker(self) -> Iterator[None]:
        begun = time.thread_time()
        yield
        self._others += time.thread_time() - begun


class Answer(Future[Any]):
    """A packed answer, unpacked by the driver when it is read."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self.read = read

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self.read()


class CountingGroup(WorkerGroup):
    """Workers in this process, reached by the messages that Ray would carry."""

    overlaps = True

    def __init__(self, workers: Sequence[Any], meter: Meter) -> None:
        self.workers, self.meter = workers, meter
        self.worker_class, self.config, self.world_size = type(workers[0]), workers[0].config, len(workers)

    def _send(self, rank: int, name: str, arguments: tuple[Any, ...]) -> Future[Any]:
        return self._send_same([rank], name, arguments)[0]

    def _send_same(self, ranks: Sequence[int], name: str, arguments: tuple[Any, ...]) -> list[Future[Any]]:
        parcel = pack(arguments)
        self.meter.sent[self.meter.stage] += size_of(parcel)
        with self.meter.worker():
            answers = [pack(getattr(self.workers[rank], name)(*unpack(parcel))) for rank in ranks]
        return [Answer(lambda answer=answer: self._read(answer)) for answer in answers]

    def _read(self, answer: Any) -> Any:
        self.meter.received[self.meter.stage] += size_of(answer)
        return unpack(answer)

    def _joined(self, parts: list[Future[Any]], join: Callable[[list[Any]], Any]) -> Future[Any]:
        return Answer(lambda: join([part.result() for part in parts]))

    def wait_any(self, futures: Sequence[Future[Any]]) -> None:
        """All are done."""


class InventingWorker(ActorRolloutRefWorker):
    """Answers as a worker with a model would, without one."""

    def __init__(self, config: PPOConfig, tokenizer: Any, tokens: int, teams: int) -> None:
        self.config, self.tokenizer, self.tokens, self.teams = config, tokenizer, tokens, teams
        self.waiting: list[Any] = []
        self.seen = TokenStats()

    def engine_facts(self) -> EngineFacts:
        facts: Any = {field: None for field in EngineFacts.__dataclass_fields__}
        facts |= {"dtype": torch.float32, "packed": True, "shares_prompts": True, "width": 4096, "joining": 0.0}
        facts |= {"token_budget": 2 * self.tokens, "sequence_parallel": self.teams, "pipeline": 1, "pairs": False}
        return EngineFacts(**facts)

    def submit(self, prompts: DataProto) -> None:
        fields = prompts.non_tensor_batch
        asked = zip(fields["uid"], fields["sample"], fields["raw_prompt_ids"], strict=True)
        self.waiting += [((uid, sample), ids, prompts.meta_info) for uid, sample, ids in asked]

    def advance(self, *_: Any) -> tuple[list[Output], bool, list[Output]]:
        if not self.waiting:
            return [], False, []
        (key, prompt, how), *self.waiting = self.waiting
        ids = np.random.default_rng(abs(hash(key))).integers(1, 90, self.tokens).tolist()
        log_probs = np.full(self.tokens, -1.0, np.float32)
        outputs = [Output(key, ids, log_probs, "length", [(0, self.tokens)])]
        if has_store():
            outputs = keep_outputs(outputs, [prompt], texts_of([ids], self.tokenizer) if how["texts"] else [None])
        return outputs, bool(self.waiting), []

    def compute_log_prob(self, data: DataProto, passes: Any = None) -> DataProto:
        real = data.batch["response_mask"].float()
        assert data.batch["input_ids"].shape[0] == len(data)
        found = batch_of(old_log_probs=-real, entropy=real)
        return keep_rows(found, data) if has_store() and len(data) else found

    def update_actor(self, plan: Any) -> list[Measures]:
        for mini in plan:
            assert len(mini.data.batch["input_ids"]) == len(mini.data.batch["advantages"])
            real = mini.data.batch["response_mask"].float()
            self.seen.add(mini.data.batch, {"log_probs": -real, "entropy": real})
        return [Measures() for _ in plan]

    def token_stats(self) -> Any:
        kept = self.seen.take()
        return StoredStats.of(kept) if has_store() else kept


class InventedScores:
    """In place of the reward workers' processes: every response gets a score."""

    def __init__(self, meter: Meter) -> None:
        self.meter, self.ready, self.spec = meter, [], SimpleNamespace(parts=[], form="single")

    def submit_many(self, items: Sequence[tuple[Any, Any]]) -> None:
        self.meter.sent[self.meter.stage] += sum(len(item.solution_str) for _, item in items)
        self.ready += [(key, RewardResult(float(hash(key) % 2))) for key, _ in items]

    def poll(self) -> list[tuple[Any, RewardResult]]:
        ready, self.ready = self.ready, []
        return ready

    wait_some = poll


def bytes_held(batch: DataProto) -> int:
    """Bytes of the batch's tensors in this process, each memory counted once; what it only names counts as packed."""
    held = batch.batch.columns()
    tensors = [value.untyped_storage() for value in held.values() if isinstance(value, torch.Tensor)]
    named = {name: value for name, value in held.items() if not isinstance(value, torch.Tensor)}
    return sum({memory.data_ptr(): memory.nbytes() for memory in tensors}.values()) + size_of(pack(named))


def prompts_of(count: int) -> DataProto:
    ids = np.empty(count, dtype=object)
    for row in range(count):
        ids[row] = np.random.default_rng(row).integers(1, 90, PROMPT_TOKENS).tolist()
    none = np.full(count, None, dtype=object)
    return DataProto.from_dict(
        non_tensors={"raw_prompt_ids": ids, "data_source": none, "ground_truth": none, "extra_info": none}
    )


def settings(arguments: argparse.Namespace) -> PPOConfig:
    config = PPOConfig()
    values = {
        "actor_rollout_ref.rollout.n": arguments.n,
        "actor_rollout_ref.actor.ppo_mini_batch_size": max(1, arguments.prompts // 4),
        "data.max_response_length": arguments.tokens,
    }
    for key, value in values.items():
        assign(config, key, value)
    return config


def step(arguments: argparse.Namespace, meter: Meter) -> int:
    """One step of GRPO; gives the bytes that the driver holds at its end."""
    config, tokenizer = settings(arguments), byte_tokenizer()
    workers = [InventingWorker(config, tokenizer, arguments.tokens, arguments.teams) for _ in range(arguments.workers)]
    actor = ColocatedGroup(CountingGroup(workers, meter))
    pool: Any = InventedScores(meter) if arguments.texts else None
    rewards = RewardManager(pool, tokenizer)
    rewards.watch = None
    experience = Experience(config, tokenizer, actor.rollout, rewards)
    with meter.of("rollout"):
        rows = experience.ask(experience.number(prompts_of(arguments.prompts)), arguments.n)
        batch = experience.wait_for_responses(rows)
    with meter.of("scores"):
        experience.with_token_scores(experience.wait_for_scores(batch))
        batch.meta_info["step"] = 1
    with meter.of("old log-probs"):
        batch.union(actor.compute_log_prob(batch))
    with meter.of("advantages"):
        compute_advantage(batch, "grpo", config=config.algorithm)
    with meter.of("update"):
        if arguments.samples:
            batch.batch[ROW] = torch.arange(len(batch))
        actor.update_actor(batch)
    with meter.of("metrics"):
        step_metrics(batch, timing={}, update={}, max_response_length=arguments.tokens)
    if arguments.samples:
        with meter.of("samples"):
            write_samples(batch, actor, meter)
    return bytes_held(batch)


def write_samples(batch: DataProto, actor: ColocatedGroup, meter: Meter) -> None:
    """As the trainer: a process of its own writes them, or the driver if it has all rows."""
    del batch.batch[ROW]
    for name, values in actor.token_stats().items():
        batch.batch[name] = values
    if SampleWriter.takes(batch):
        meter.sent[meter.stage] += size_of(packed_samples(batch))
    else:
        sample_table(1, batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("prompts", 32), ("n", 16), ("tokens", 32768), ("workers", 64), ("teams", 1), ("scale", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--no-store", action="store_true", help="rows travel through the driver")
    parser.add_argument("--samples", action="store_true", help="the samples of the step are written")
    parser.add_argument("--no-texts", dest="texts", action="store_false", help="no reward function reads the texts")
    arguments = parser.parse_args()
    if not arguments.no_store:
        need("ray", get=f"{sys.executable} -m pip install 'ray>=2.50'")
        import ray

        tokens = arguments.prompts * arguments.n * (arguments.tokens + PROMPT_TOKENS)
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=(32 if arguments.samples else 24) * tokens + 2**28,
        )
        use_store(put_block)
    meter = Meter()
    held = step(arguments, meter) * arguments.scale / GB
    rows = arguments.prompts * arguments.n
    print(f"{rows} responses of {arguments.tokens} tokens, {arguments.workers} workers in teams of {arguments.teams};")
    print(f"figures times {arguments.scale}\n\n| stage | sent GB | received GB | driver's CPU seconds |")
    print("|---|---|---|---|")
    totals = [0.0, 0.0, 0.0]
    for stage in meter.seconds:
        found = [meter.sent[stage] / GB, meter.received[stage] / GB, meter.seconds[stage]]
        totals = [total + value * arguments.scale for total, value in zip(totals, found, strict=True)]
        print(f"| {stage} | " + " | ".join(f"{value * arguments.scale:.3f}" for value in found) + " |")
    print("| all | " + " | ".join(f"{value:.3f}" for value in totals) + f" |\n\nheld in the batch: {held:.3f} GB")


if __name__ == "__main__":
    main()
