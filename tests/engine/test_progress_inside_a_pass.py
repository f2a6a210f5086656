"""A pass over many rows counts while it is computed, layer by layer, and gives the same gradient."""

from __future__ import annotations

import pytest
import torch

from posttrain import pulse
from tests.engine.engine_tools import gradient, objective, ragged_batch

LAYERS, ROWS = 2, 16


@pytest.fixture
def seen(monkeypatch):
    """What the live row would have shown, each time that something counted."""
    counts: list[int] = []
    plain = pulse.Work.inside

    def inside(self, part):
        plain(self, part)
        counts.append(self.shown)

    monkeypatch.setattr(pulse.Work, "inside", inside)
    return counts


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_update_in_one_pass_counts_before_it_ends(make_engine, seen, checkpointing):
    one = make_engine(gradient_checkpointing=checkpointing)
    with pulse.work("rows", ROWS) as work:
        gradient(one, ragged_batch(ROWS), objective())
        assert work.done == ROWS
    assert seen == sorted(seen) and seen[0] > 0 and seen[-1] == ROWS - 1, seen
    assert len(set(seen)) >= LAYERS + 1  # forward and backward


def test_log_probs_count_too_and_nothing_counts_outside_of_passes(make_engine, seen):
    one = make_engine()
    one.module(torch.tensor([[1, 2, 3]]))
    assert seen == []
    one.log_probs(ragged_batch(ROWS))
    assert len(seen) == LAYERS and seen[-1] == ROWS - 1


def test_counting_changes_no_gradient(make_engine):
    counts, plain = make_engine(), make_engine()
    plain.runner.progress = None
    found = [gradient(one, ragged_batch(ROWS), objective()) for one in (counts, plain)]
    assert torch.equal(*found)
