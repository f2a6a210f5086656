"""Rows stay with the workers that made them: what the driver moves does not grow with the responses."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from posttrain import algorithms
from posttrain.batch.columns import (
    Block,
    Column,
    EveryTokenColumn,
    Held,
    Holder,
    LastTokenColumn,
    StoredColumn,
    use_store,
)
from posttrain.batch.compact import compact, keep_rows
from posttrain.batch.fields import ROUTES
from posttrain.controller.group import Calls
from posttrain.controller.rank_host import pack, size_of, unpack
from posttrain.engine.micro_batches import plan_units
from posttrain.protocol import DataProto
from posttrain.rollout.base import Output
from posttrain.rollout.generate import to_batch
from posttrain.rollout.stored import keep_outputs
from posttrain.tracking import samples
from posttrain.tracking.metrics import step_metrics
from posttrain.tracking.samples import sample_table, sample_table_in_parts
from posttrain.trainer.ppo import sample_writer
from posttrain.trainer.ppo.advantages import compute_advantage
from posttrain.trainer.ppo.sample_writer import packed_samples
from posttrain.workers.measures import ROW, StoredStats, TokenStats, join_token_stats
from posttrain.workers.update_plan import Schedule, by_passes_with_routes, plan_updates, token_weights, with_routes

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "measure_data_plane.py"
PAD = 7
PROMPTS = [[3, 4], [3, 4], [5], [5]]
RESPONSES = [[11, 12, 13], [11, 12, 14], [11], [15, 16, 17, 18, 19]]
PER_RESPONSE = [name for name, found in algorithms.ADV_ESTIMATORS.items() if found.per_response]


class Elsewhere(Holder):
    """A block that this process does not hold; counts how often it is read."""

    blocks: ClassVar[list[Block]] = []
    read = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def get(self) -> Block:
        Elsewhere.read += 1
        return Elsewhere.blocks[self.number]


@pytest.fixture
def store():
    """Blocks go where reading them is counted."""

    def put(block: Block) -> Holder:
        Elsewhere.blocks.append(block)
        return Elsewhere(len(Elsewhere.blocks) - 1)

    Elsewhere.blocks, Elsewhere.read = [], 0
    use_store(put)
    yield Elsewhere
    use_store(None)


def outputs() -> list[Output]:
    made = []
    for row, ids in enumerate(RESPONSES):
        routes = np.arange(2 * (len(PROMPTS[row]) + len(ids)), dtype=np.uint8).reshape(-1, 1, 2)
        log_probs = [-0.5 * place - row for place, _ in enumerate(ids)]
        made.append(Output(("u", row), ids, log_probs, "stop", [(0, len(ids))], log_probs[::-1], routes=routes))
    return made


def stored() -> DataProto:
    """The responses in two blocks, neither of them in the order of the batch."""
    made, kept = outputs(), {}
    for rows in ([2, 0], [3, 1]):
        found = keep_outputs([made[row] for row in rows], [PROMPTS[row] for row in rows], [None] * len(rows))
        kept.update(zip(rows, found, strict=True))
    return named(to_batch(PROMPTS, [kept[row] for row in range(4)], PAD))


def named(batch: DataProto) -> DataProto:
    batch.non_tensor_batch["uid"] = ["a", "a", "b", "b"]
    return batch


def padded() -> DataProto:
    return named(to_batch(PROMPTS, outputs(), PAD))


def check_same(one: DataProto, other: DataProto) -> None:
    assert set(one.batch) == set(other.batch)
    for name in other.batch:
        assert one.batch[name].dtype == other.batch[name].dtype, name
        assert torch.equal(one.batch[name], other.batch[name]), name
    for ours, theirs in zip(one.non_tensor_batch[ROUTES], other.non_tensor_batch[ROUTES], strict=True):
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)


def test_a_stored_batch_reads_as_the_padded_one_and_is_read_only_when_asked(store):
    batch = stored()
    cut = DataProto.concat([batch[[3, 1]], batch[2:]])
    cut.union(DataProto.from_dict({"more": torch.arange(4)}))
    assert batch.batch.shape("input_ids") == (4, 7) and store.read == 0
    check_same(cut.select(list(padded().batch)), DataProto.concat([padded()[[3, 1]], padded()[2:]]))
    check_same(unpack(pack(batch[[1, 0]])), padded()[[1, 0]])


def test_a_part_of_a_batch_in_memory_travels_without_its_other_rows():
    whole = compact(padded())
    assert isinstance(whole.batch.column("input_ids"), Column)
    check_same(unpack(pack(whole[[3, 0]])), padded()[[3, 0]])
    long = to_batch([[1]] * 40, [Output(row, [2] * 500, [0.5] * 500, "stop") for row in range(40)], PAD)
    assert size_of(pack(compact(long)[[5]])) < size_of(pack(compact(long))) / 20
    # Ids in 32 bits, one number for the log-prob, nothing for masks and positions: 8 bytes a token instead of 44.
    assert size_of(pack(compact(long))) < 1.2 * 8 * 40 * 500 < size_of(pack(long)) / 4


def test_columns_that_do_not_follow_from_the_lengths_travel_as_they_are():
    batch = padded()
    batch.batch["response_mask"][0, 1] = 0  # a token that the policy did not write
    batch.batch["values"] = torch.ones(4, 5)  # also behind the responses
    batch.batch["position_ids"] += 1
    short = compact(batch)
    kept = {name for name in short.batch if not isinstance(short.batch.column(name), Column)}
    assert kept == {"response_mask", "values", "position_ids"}
    check_same(unpack(pack(short)), batch)


def test_units_of_a_stored_batch_share_prompts_and_equal_responses_without_their_tokens(store):
    made = [Output(row, ids, [0.0] * len(ids), "stop") for row, ids in enumerate(RESPONSES)]
    made[1].token_ids = [*RESPONSES[0][:-1], 99]  # equal but for the last token, which is not computed
    made[2].token_ids, made[2].log_probs = RESPONSES[3][:-1], [0.0] * 4  # a beginning of the last one
    batch = named(to_batch(PROMPTS, keep_outputs(made, PROMPTS, [None] * 4), PAD))
    units = plan_units(batch, share=True, all_pairs=False, digests=True)
    assert store.read == 0
    assert [(unit.rows, unit.tokens) for unit in units] == [([0, 1], 2 + 2), ([2, 3], 1 + 3 + 4)]
    read = named(to_batch(PROMPTS, made, PAD))  # as it comes out of a checkpoint
    assert plan_units(read, share=True, all_pairs=False, digests=True) == units
    assert [unit.tokens for unit in plan_units(read, share=True, all_pairs=False)] == [2 + 2, 1 + 4]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_weights_of_a_part_are_those_of_its_tokens_in_the_whole(store, mode):
    batch, whole = stored(), padded()
    made, counts = token_weights(batch, mode, 9.0)
    expected, tokens = token_weights(whole, mode, 9.0)
    assert counts == tokens and store.read == 0
    batch.union(DataProto(made))
    for name, weights in expected.items():
        assert torch.equal(batch[[2, 1]].batch[name], weights[[2, 1]])


@pytest.mark.parametrize("estimator", PER_RESPONSE)
def test_an_estimator_of_outcomes_gives_the_same_without_the_tokens(store, estimator):
    scores = np.array([0.25, 1.0, 0.5, -1.0], np.float32)
    found = {}
    for kind, batch in (("stored", stored()), ("padded", padded())):
        column = LastTokenColumn(scores, np.array([3, 3, 1, 5]), 5)
        placed = column if kind == "stored" else column.value()
        batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = placed
        compute_advantage(batch, estimator)
        found[kind] = batch
    assert isinstance(found["stored"].batch.column("advantages"), EveryTokenColumn) and store.read == 0
    first, second = (step_metrics(found[kind], max_response_length=5) for kind in ("stored", "padded"))
    assert first == second and "critic/advantages/mean" in first and store.read == 0
    for name in ("advantages", "returns"):
        assert torch.equal(found["stored"].batch[name], found["padded"].batch[name])


def test_an_estimator_of_tokens_is_given_them(store):
    batch = stored()
    rewards = LastTokenColumn(np.ones(4, np.float32), np.array([3, 3, 1, 5]), 5)
    batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = rewards
    compute_advantage(batch, "reinforce_plus_plus_baseline")
    assert batch.batch["advantages"].shape == (4, 5) and not isinstance(batch.batch.column("advantages"), Column)


def test_what_a_worker_computed_stays_in_its_store(store):
    batch = padded()
    found = keep_rows(DataProto.from_dict({"old_log_probs": batch.batch["rollout_log_probs"]}), batch)
    assert isinstance(found.batch.column("old_log_probs"), StoredColumn) and len(store.blocks) == 1
    assert torch.equal(found[[2, 0]].batch["old_log_probs"], batch.batch["rollout_log_probs"][[2, 0]])
    assert not isinstance(found.batch.column("old_log_probs").places.holders[0], Held)


class TwoRanks:
    """As the functions that spread a batch meet a group."""

    world_size = 2

    def once(self, name: str) -> SimpleNamespace:
        shape = {"packed": True, "shares_prompts": True, "pairs": False, "joining": 0.0, "token_budget": 64, "width": 8}
        return SimpleNamespace(**shape, max_rows=None, all_pairs=False, sequence_parallel=1, pipeline=1)


def test_routes_of_experts_go_from_rank_to_rank_by_reference(store):
    batch, schedule = stored(), Schedule(prompts=2, epochs=1, shuffle=False, seed=0)
    group: Any = TwoRanks()
    recorded = with_routes(DataProto(), list(padded().non_tensor_batch[ROUTES]))
    later = stored()  # R2: recorded by the pass over old log-probs, in the store of the rank that made it
    later.non_tensor_batch[ROUTES] = keep_rows(recorded, batch).non_tensor_batch.column(ROUTES)
    for data in (batch, later):
        made: list[Calls] = [by_passes_with_routes(group, data), plan_updates(group, data, schedule, lambda mini: mini)]
        parcels = [pack(arguments) for calls in made for arguments in calls.arguments]
        assert store.read == 0
        rows = [arguments[0] for arguments in made[0].arguments]
        rows += [step.data for (plan,) in made[1].arguments for step in plan.steps]
        found = [routes.tolist() for part in rows for routes in part.non_tensor_batch[ROUTES]]
        wanted = [routes.tolist() for routes in padded().non_tensor_batch[ROUTES]]
        assert sorted(found) == sorted(wanted * 2) and store.read > 0 and len(parcels) == 4
        store.read = 0


def script():
    sys.path.append(str(SCRIPT.parent))  # scripts import each other
    spec = importlib.util.spec_from_file_location("measure_data_plane", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("samples", [False, True])
def test_the_bytes_of_the_driver_do_not_grow_with_the_responses(store, samples, monkeypatch):
    measure = script()
    monkeypatch.setattr(sample_writer, "LARGE", 0)

    def step(tokens: int) -> tuple[float, float]:
        meter = measure.Meter()
        sizes = {"prompts": 4, "n": 4, "tokens": tokens, "workers": 4, "teams": 2, "texts": False, "samples": samples}
        held = measure.step(argparse.Namespace(**sizes), meter)
        return sum(meter.sent.values()) + sum(meter.received.values()), held

    (moved, held), (moved_long, held_long) = step(64), step(4096)
    assert moved_long < 1.01 * moved and held_long < 1.01 * held


def trained(count: int, width: int) -> list[TokenStats]:
    """Two ranks that have trained on rows twice, and not on the same ones each time."""
    ranks = [TokenStats(), TokenStats()]
    for number, order in enumerate(([3, 0], [2, 1], [1, 3], [0, 2])):
        values = torch.arange(len(order) * width, dtype=torch.float32).reshape(-1, width) + 1 + 100 * number
        for row, own in zip(order, values, strict=True):
            own[len(RESPONSES[row]) :] = 0.0
        ranks[number % 2].add({ROW: torch.tensor(order)}, {"log_probs": -values, "entropy": values / 2})
    return ranks


def test_what_an_update_computed_of_tokens_stays_with_the_ranks_as_of_the_first_time(store):
    plain = join_token_stats([rank.take()[:1] for rank in trained(4, 5)], Calls([]))
    kept = [StoredStats.of(rank.take()) for rank in trained(4, 5)]
    found = join_token_stats([kept[0], None, kept[1]], Calls([]))
    assert store.read == 0 and all(isinstance(column, StoredColumn) for column in found.values())
    for name, values in plain.items():
        assert torch.equal(found[name].value(), values)
    assert StoredStats.of([]) is None and join_token_stats([None, []], Calls([])) == {}


def test_rows_that_no_rank_trained_on_have_zeros(store):
    seen = TokenStats()
    seen.add({ROW: torch.tensor([2, 0])}, {"log_probs": -torch.ones(2, 3), "entropy": torch.ones(2, 3)})
    found = join_token_stats([StoredStats.of(seen.take())], Calls([]))
    assert found["entropy"].tolist() == [[1.0] * 3, [0.0] * 3, [1.0] * 3]


def with_everything(batch: DataProto) -> DataProto:
    """As a finished step leaves it."""
    batch.non_tensor_batch["uid"] = np.array(["a", "a", "b", "b"], dtype=object)
    batch.non_tensor_batch["unused"] = np.array([None] * 4, dtype=object)
    scores = LastTokenColumn(np.array([0.0, 1.0, 0.5, 2.0], np.float32), np.array([3, 3, 1, 5]), 5)
    batch.batch["token_level_scores"] = scores
    return batch.set_decoder(lambda ids: " ".join(map(str, ids)))


def test_samples_made_elsewhere_from_references_are_those_made_here(store, monkeypatch):
    monkeypatch.setattr(samples, "ROWS_AT_ONCE", 3)  # parts that cut a group
    expected = sample_table(7, with_everything(padded()), sampling={"n": 2})
    batch = with_everything(stored())
    parcel = packed_samples(batch)
    assert store.read == 0 and "response" in batch.non_tensor_batch
    arrived: DataProto = unpack(parcel)
    assert "unused" not in arrived.non_tensor_batch
    arrived.set_decoder(lambda ids: " ".join(map(str, ids)))
    found = sample_table_in_parts(7, arrived, sampling={"n": 2})
    assert found.to_pylist() == expected.to_pylist() and found.schema == expected.schema


def test_large_batches_that_lie_elsewhere_are_written_by_another_process(store, monkeypatch):
    small, here = with_everything(stored()), with_everything(padded())
    assert not sample_writer.SampleWriter.takes(small)
    monkeypatch.setattr(sample_writer, "LARGE", 100)
    assert sample_writer.SampleWriter.takes(small) and not sample_writer.SampleWriter.takes(here)
    use_store(None)
    assert not sample_writer.SampleWriter.takes(with_everything(stored()))  # in this process's memory


def test_a_process_that_writes_samples_is_started_again_and_what_it_cannot_write_is_raised(store, monkeypatch):
    ray = pytest.importorskip("ray")
    notes, started, answers, ended = [], [], [], []
    writer = sample_writer.SampleWriter(None, notes.append, limit_s=7.0)
    host = SimpleNamespace(write=SimpleNamespace(remote=lambda *given: given))

    def start():
        started.append(1)
        writer._host = host
        return host

    monkeypatch.setattr(writer, "_started", start)

    def get(ref, timeout):
        assert timeout == 7
        if isinstance(error := answers.pop(0), Exception):
            raise error

    def failed(cause: Exception) -> Exception:
        return ray.exceptions.RayTaskError("write", "a traceback", cause).as_instanceof_cause()

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "kill", ended.append)
    write = writer.job("folder", 3, with_everything(stored()), {})
    answers[:] = [ray.exceptions.ActorDiedError(), None]
    write()
    assert len(started) == 2 and not notes
    answers[:] = [failed(ray.exceptions.ObjectLostError("00" * 28, None, ""))] * 2
    write()
    assert len(started) == 4 and "samples of step 3 were not written" in notes[0]
    answers[:] = [failed(OSError(28, "No space left on device")), None]
    with pytest.raises(OSError, match="No space left"):
        write()
    assert len(started) == 5 and len(notes) == 1 and not ended
    answers[:] = [ray.exceptions.GetTimeoutError("no answer"), None]  # as of a process that was stopped
    write()
    assert len(started) == 7 and ended == [host] and len(notes) == 1


def test_a_number_per_response_stands_on_its_last_token_or_on_all_of_them():
    values, lengths = np.array([2.0, 3.0, 5.0], np.float32), np.array([3, 1, 0])
    last, every = (kind(values, lengths, 3) for kind in (LastTokenColumn, EveryTokenColumn))
    # A response without tokens keeps its score, at the first place: it has no other.
    assert last.value().tolist() == [[0.0, 0.0, 2.0], [3.0, 0.0, 0.0], [5.0, 0.0, 0.0]]
    assert every.value().tolist() == [[2.0, 2.0, 2.0], [3.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    for column in (last, every):
        assert column.row_sums().tolist() == column.value().double().sum(-1).tolist()
