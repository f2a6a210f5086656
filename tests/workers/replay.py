"""Rollouts that are recorded once and replayed on any number of processes, known by (uid, sample).

What is sampled after an update depends on it in its last bit; so runs on different numbers of processes can be compared
step by step only where they learn from the same responses. Filtered groups replay too: which prompts are drawn anew is
decided by the scores of what was recorded.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.controller.group import WorkerGroup, all_of, register, to_all
from posttrain.controller.pool import StagePeaks, Workers
from posttrain.models import fused_layer
from posttrain.rollout.base import Output, Request, RolloutEngine, WrappedEngine
from posttrain.workers.fsdp_workers import ActorRefWorker, ActorRolloutRefWorker, CriticWorker, RolloutWorker
from posttrain.workers.supervised import PairWorker, SFTWorker

LENGTHS = (2, 2, 3, 5, 9, 17, 40, 200)  # tokens of a response, at most


class Recorder(WrappedEngine):
    """An engine whose responses are cut to uneven lengths and kept."""

    def __init__(self, inner: RolloutEngine) -> None:
        super().__init__(inner)
        self.kept: dict[Hashable, Any] = {}

    def submit(self, request: Request) -> None:
        uid, sample = request.id  # pyright: ignore
        most = LENGTHS[(5 * int(uid) + 3 * int(sample)) % len(LENGTHS)]
        self.kept[request.id] = list(request.prompt_ids)
        self.inner.submit(replace(request, sampling=replace(request.sampling, max_tokens=most)))

    def step(self) -> list[Output]:
        ended = self.inner.step()
        self.kept.update({output.id: (self.kept[output.id], output) for output in ended})
        return ended


class Replay(Recorder):
    """An engine that answers with what was recorded for the same prompt; scores and weights are the inner one's."""

    def __init__(self, inner: RolloutEngine, recording: Path) -> None:
        super().__init__(inner)
        self.kept = pickle.loads(recording.read_bytes())
        self.waiting: list[Request] = []

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def step(self) -> list[Output]:
        asked, self.waiting = self.waiting, []
        return [self._output(request) for request in asked]

    def _output(self, request: Request) -> Output:
        prompt, output = self.kept[request.id]
        assert list(request.prompt_ids) == prompt, f"{request.id}: recorded for another prompt"
        return replace(output, versions=[(self.version, len(output.token_ids))])

    def has_work(self) -> bool:
        return bool(self.waiting)


class Counting:
    """Counts the passes of fused layers in its process."""

    calls = 0

    @register(to_all)
    def init_model(self) -> None:
        plain = fused_layer._FusedLayer.forward
        if not getattr(plain, "counted", False):

            def counted(*args: Any) -> Any:
                Counting.calls += 1
                return plain(*args)

            counted.counted = True  # pyright: ignore
            fused_layer._FusedLayer.forward = staticmethod(counted)
        super().init_model()  # pyright: ignore
        Counting.calls = 0

    @register(to_all, lambda results, calls: results)
    def fused_layers(self) -> int:
        return Counting.calls


class FromRecording:
    """Holds where recorded rollouts are, if there are some."""

    def __init__(self, *args: Any, recording: Path | None = None, **named: Any) -> None:
        super().__init__(*args, **named)
        self.recording = recording


class Policy(FromRecording, Counting, ActorRolloutRefWorker):
    @register(to_all)
    def init_model(self) -> None:
        super().init_model()
        inner = self.rollout.engine
        self.rollout.engine = Recorder(inner) if self.recording is None else Replay(inner, self.recording)


class Trained(Counting, ActorRefWorker):
    """Tells what it holds of a model, and where it is."""

    @register(to_all, all_of)
    def holds(self) -> tuple[int, set[str]]:
        return os.getpid(), {name for name in ("optimizer", "module") if getattr(self.engine, name, None) is not None}


class Generating(FromRecording, RolloutWorker):
    """The same of a worker that only generates."""

    @register(to_all)
    def init_model(self) -> None:
        super().init_model()
        if self.recording is not None:
            self.engine = Replay(self.engine, self.recording)

    @register(to_all, all_of)
    def holds(self) -> tuple[int, set[str]]:
        names = ("optimizer", "policy", "actor", "engine")
        return os.getpid(), {name for name in names if getattr(self, name, None) is not None}


class Critic(Counting, CriticWorker):
    pass


class Learner(Counting, SFTWorker):
    pass


class Scorer(Counting, PairWorker):
    pass


KINDS: dict[type, type] = {ActorRefWorker: Trained, CriticWorker: Critic, SFTWorker: Learner, PairWorker: Scorer}


class Watched(Workers):
    """Makes workers that count fused layers and whose rollouts are replayed, or recorded without a `recording`."""

    def __init__(self, inner: Workers, recording: Path | None = None) -> None:
        self.inner, self.recording, self.world_size = inner, recording, inner.world_size
        self.own_size = inner.own_size
        self.groups: dict[str, WorkerGroup] = {}

    def create(self, role: str, worker: type, *arguments: Any, **named: Any) -> WorkerGroup:
        generates = {ActorRolloutRefWorker: Policy, RolloutWorker: Generating}
        if worker in generates:
            made = self.inner.create(role, generates[worker], *arguments, recording=self.recording, **named)
        else:
            made = self.inner.create(role, KINDS[worker], *arguments, **named)
        self.groups[role] = made
        return made

    def words(self) -> str:
        return self.inner.words()

    def places(self, generating: int = 0) -> list[str]:
        return self.inner.places(generating)

    def peaks(self) -> StagePeaks:
        return self.inner.peaks()

    def close(self) -> None:
        """They serve further runs."""
