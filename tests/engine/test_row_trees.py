"""Trees of rows: the gradient is that of separate rows, whatever they share, on one rank and on two."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_tools import VOCABULARY, gradient, objective
from forked_ranks import run_ranks

from posttrain.batch.samples import has_several_rows
from posttrain.engine.micro_batches import plan_ranks, plan_units
from posttrain.engine.packing import packed_units
from posttrain.protocol import DataProto
from posttrain.rollout.base import Output
from posttrain.rollout.generate import to_batch
from posttrain.workers.actor.dp_actor import ActorObjective


def tree_batch(seed: int, groups: int = 2, samples: int = 3, dtype: torch.dtype = torch.float64) -> DataProto:
    """Samples of one to six rows: branches behind any token of any earlier row, or with a prompt of their own."""
    rng = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> list[int]:
        return rng.integers(0, VOCABULARY, rng.integers(low, high)).tolist()

    prompts: list[list[int]] = []
    outputs: list[Output] = []
    fields: dict[str, list] = {name: [] for name in ("uid", "sample", "branch", "parent", "fork", "turn_ends")}
    for group in range(groups):
        prompt = tokens(20, 40)
        for sample in range(samples):
            rows: list[tuple[list[int], list[int]]] = []
            for branch in range(int(rng.integers(1, 7))):
                parent = int(rng.integers(0, branch)) if branch else None
                own_prompt, context = prompt, tokens(0, 4) if branch == 0 else []
                fork = 0
                if parent is not None and rng.random() < 0.8:
                    own_prompt, other = rows[parent]
                    cut = int(rng.integers(0, len(other) + 1))
                    context, fork = [*other[:cut], *tokens(0, 4)], len(own_prompt) + cut
                elif parent is not None:
                    own_prompt = tokens(5, 30)  # compacted
                written = tokens(1, 12)
                rows.append((own_prompt, [*context, *written]))
                marks = [False] * len(context) + [True] * len(written)
                log_probs = rng.normal(-3, 1, len(marks)).tolist()
                prompts.append(own_prompt)
                outputs.append(Output((group, sample), rows[-1][1], log_probs, "stop", written=marks))
                values = (str(group), sample, branch, parent, fork, [(branch, len(marks))])
                for name, value in zip(fields, values, strict=True):
                    fields[name].append(value)
    batch = to_batch(prompts, outputs, pad_token_id=0)
    batch.union(DataProto.from_dict(non_tensors=fields))
    mask = batch.batch["response_mask"]
    batch.batch["rollout_log_probs"] = batch.batch["rollout_log_probs"].to(dtype)
    for name, mean in (("advantages", 0.0), ("old_log_probs", -5.0), ("ref_log_prob", -5.0)):
        batch.batch[name] = torch.from_numpy(rng.normal(mean, 0.7, size=mask.shape)).to(dtype) * mask
    return batch


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("seed", range(4))
def test_the_tokens_of_a_tree_are_computed_once_and_seen_by_their_own_row_alone(seed):
    """Against a dictionary of prefixes: what is fed, at which positions, behind which tokens, predicting what."""
    batch = tree_batch(seed)
    assert has_several_rows(batch)
    units = plan_units(batch, share=True, all_pairs=False)
    assert sorted(row for unit in units for row in unit.rows) == list(range(len(batch)))
    order = [row for unit in units for row in unit.rows]
    rows = packed_units(batch[order], units, torch.device("cpu"))
    layout = rows.layout
    ids, ends = rows.input_ids[0].tolist(), layout.sight.end.tolist()
    starts = np.repeat(layout.sight.unit_starts[:-1], layout.lengths)
    behind = {}
    for place in range(len(ids)):
        seen = [ids[t] for t in range(int(starts[place]), place + 1) if ends[t] > place]
        assert len(seen) == int(rows.position_ids[0, place]) + 1
        behind[place] = tuple(seen)
    predicted = {}
    for number, slot in enumerate(rows.slot_N.tolist()):
        pair = number if rows.source_N is None else int(rows.source_N[number])
        predicted[slot] = behind[int(rows.predict_U[pair])], int(rows.label_U[pair])
    width = batch.batch["responses"].shape[1]
    whole = batch[order].batch
    wanted = {}
    for row in range(len(batch)):
        real = whole["attention_mask"][row].bool()
        tokens = whole["input_ids"][row][real].tolist()
        prompt = int(real[:-width].sum())
        for place in range(prompt, len(tokens)):
            wanted[row * width + place - prompt] = tuple(tokens[:place]), tokens[place]
    assert predicted == wanted
    distinct, number = 0, 0
    for unit in units:
        prefixes: set[tuple] = set()
        for row in range(number, number + len(unit.rows)):
            tokens = tuple(whole["input_ids"][row][whole["attention_mask"][row].bool()].tolist())
            prefixes |= {tokens[:end] for end in range(1, len(tokens))}
        distinct, number = distinct + len(prefixes), number + len(unit.rows)
    assert distinct <= len(ids) == sum(unit.tokens for unit in units) <= 1.05 * distinct
    separate = plan_units(batch, share=False, all_pairs=False)
    assert len(ids) < 0.8 * sum(unit.tokens for unit in separate)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_of_a_tree_is_that_of_separate_rows(make_engine, monkeypatch, seed, mode):
    batch = tree_batch(seed)
    wanted = gradient(make_engine(share_prompts=False), batch, objective(loss_agg_mode=mode))
    shares_always(monkeypatch)
    for how in ({}, {"token_budget": 150}, {"max_rows": 3}):
        assert relative(gradient(make_engine(**how), batch, objective(loss_agg_mode=mode)), wanted) < 1e-12


def test_in_float32_trees_go_through_the_compiled_kernels(make_engine):
    batch = tree_batch(5, dtype=torch.float32)
    wanted = gradient(make_engine(torch.float32, share_prompts=False), batch, objective())
    assert relative(gradient(make_engine(torch.float32), batch, objective()), wanted) < 1e-5


def shares_always(monkeypatch) -> None:
    """In float64 attention computes all pairs, so that small trees would be cheaper apart."""
    monkeypatch.setattr("posttrain.engine.micro_batches._cost", lambda tokens, width: tokens)


def test_the_rows_of_a_sample_weigh_as_one_response():
    """Each aggregation written out: samples are counted, not rows."""
    batch = tree_batch(1)
    mask = batch.batch["response_mask"].double()
    keys = list(zip(batch.non_tensor_batch["uid"], batch.non_tensor_batch["sample"], strict=True))
    tokens = {key: sum(float(mask[row].sum()) for row, own in enumerate(keys) if own == key) for key in keys}
    assert len(tokens) < len(keys)
    wanted = {
        "token-mean": lambda key: 1 / sum(tokens.values()),
        "token-sum": lambda key: 1.0,
        "seq-mean-token-sum": lambda key: 1 / len(tokens),
        "seq-mean-token-mean": lambda key: 1 / tokens[key] / len(tokens),
        "seq-mean-token-sum-norm": lambda key: 1 / 12.0 / len(tokens),
    }
    for mode, weight in wanted.items():
        prepared = objective(loss_agg_mode=mode).prepare(batch[:])
        expected = torch.stack([mask[row] * weight(key) for row, key in enumerate(keys)])
        torch.testing.assert_close(prepared.batch["loss_weights"].double(), expected, rtol=1e-6, atol=0)


def test_ranks_get_equal_numbers_of_passes_over_all_rows_of_trees(make_engine):
    batch = tree_batch(2)
    facts = make_engine(token_budget=120).facts()
    for ranks in (2, 3, len(batch) + 1):
        parts = plan_ranks(batch, facts, ranks)
        assert sorted(row for part in parts for row in part.rows) == list(range(len(batch)))
        assert len({len(part.passes) for part in parts}) == 1


def compare_ranks(rank: int, ranks: int, make, batch: DataProto, wanted: torch.Tensor) -> None:
    engine = make()
    facts = engine.facts()
    loss: ActorObjective = objective(loss_agg_mode="seq-mean-token-mean")
    prepared = loss.prepare(batch)
    part = plan_ranks(prepared, facts, ranks)[rank]
    own = prepared[part.rows] if part.rows else prepared[[]]
    engine.runner.gradients(own, loss, 0.7, part.passes)
    found = torch.cat([master.grad.flatten() for master in engine.runner.optimizer.masters])
    torch.distributed.all_reduce(found)
    error = relative(found, wanted)
    assert error < 1e-12, error


def test_two_ranks_have_the_gradient_of_one(make_engine, monkeypatch):
    from engine_tools import TEMPERATURE

    assert TEMPERATURE == 0.7
    batch = tree_batch(3)
    wanted = gradient(make_engine(share_prompts=False), batch, objective(loss_agg_mode="seq-mean-token-mean"))
    shares_always(monkeypatch)
    assert run_ranks(2, compare_ranks, make_engine, batch, wanted)
