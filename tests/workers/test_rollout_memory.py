"""What a rollout engine holds while its worker syncs and generates: weights are synced before a cache is taken."""

from __future__ import annotations

import numpy as np
import pytest
from runs import run
from textbook import ROLLOUT, actor

from posttrain.protocol import DataProto
from posttrain.rollout.native.engine import NativeEngine
from posttrain.workers.fsdp_workers import ActorRolloutRefWorker


def prompts() -> DataProto:
    """Two rows of two prompts."""
    ids = np.empty(2, dtype=object)
    ids[:] = [[256, 40, 50], [256, 41]]
    fields = {"uid": np.array(["0", "1"], object), "sample": np.array([0, 0], object), "seed": np.array([1, 2], object)}
    return DataProto.from_dict(non_tensors={"raw_prompt_ids": ids, **fields})


@pytest.mark.parametrize("name", ["native", "hf"])
def test_the_cache_sleeps_while_weights_are_synced_and_wakes_with_the_next_requests(tiny_model, monkeypatch, name):
    monkeypatch.setattr("posttrain.rollout.native.pool.KEPT", 0)
    group = actor(tiny_model, {f"{ROLLOUT}.name": name})
    engine, seen = group.worker.rollout.engine, []

    def tell(what: str) -> None:
        plain = getattr(engine, what)

        def told(*args, **named):
            seen.append((what, sorted(engine.asleep), engine.cache_bytes() > 0))
            return plain(*args, **named)

        monkeypatch.setattr(engine, what, told)

    for what in ("load_weights", "score", "submit", "step"):
        tell(what)
    for version in (1, 2):
        group.sync_weights(version)
        group.submit(prompts())
        while group.advance()[1]:
            pass
        synced = [call for call in seen if call[0] in ("load_weights", "score")]
        assert synced and all(call[1:] == (["cache"], False) for call in synced)
        asked = [call for call in seen if call[0] in ("submit", "step")]
        assert asked and all(asleep == [] for _, asleep, _ in asked) and any(held for _, _, held in asked)
        assert sorted(engine.asleep) == ["cache", "weights"] and engine.cache_bytes() == 0
        seen.clear()


def test_who_trains_and_generates_holds_the_weights_once_no_cache_while_it_trains_and_logs_the_peak_of_each_stage(
    tiny_model, sums, tmp_path, monkeypatch
):
    monkeypatch.setattr("posttrain.rollout.native.pool.KEPT", 0)
    caches: dict[str, list[int]] = {"step": [], "update_actor": []}
    step, update = NativeEngine.step, ActorRolloutRefWorker.update_actor

    def stepped(engine):
        caches["step"].append(engine.cache_bytes())
        return step(engine)

    def updated(worker, plan):
        caches["update_actor"].append(worker.rollout.engine.cache_bytes())
        own = worker.engine.module.model.layers[0].self_attn.q_proj.weight
        assert worker.rollout.engine.decoder.layers[0].qkv.weight.data_ptr() == own.data_ptr()
        return update(worker, plan)

    updated.spread, updated.join = update.spread, update.join  # pyright: ignore
    monkeypatch.setattr(NativeEngine, "step", stepped)
    monkeypatch.setattr(ActorRolloutRefWorker, "update_actor", updated)
    result = run(tiny_model, sums, tmp_path)
    assert caches["update_actor"] == [0, 0] and max(caches["step"]) > 0
    stages = [f"perf/memory_gb/{stage}" for stage in ("gen", "sync", "update_actor")]
    assert all(line["perf/memory_gb"] >= max(line[stage] for stage in stages) > 0 for line in result.metrics)
