"""Rows of captured decoding find places, keep them, and move together when they become few; no device is needed."""

from unittest.mock import Mock

import numpy as np
import torch

from posttrain.kernels.cuda import async_rounds, bucket
from posttrain.kernels.cuda.async_rounds import FREE, PendingResults, RowPlaces
from posttrain.kernels.whole_step import places_of


def test_places_of_numbers():
    held = np.array([7, FREE, 3, FREE, 12])
    assert places_of(np.array([3, 12, 5, 7]), held).tolist() == [2, 4, -1, 0]
    assert places_of(np.array([3]), held[:0]).tolist() == [-1]


def test_what_is_done_to_the_buffers_gives_every_row_a_place_of_its_own():
    """Rows come and go at random. `there` is what the buffers would hold if they did as they are told."""
    random, order, there = np.random.default_rng(0), RowPlaces(48), np.full(48, FREE)
    rows, started, moves = np.zeros(0, np.int64), 0, 0
    for _ in range(300):
        stay = rows[random.random(len(rows)) < random.choice([0.3, 0.9])]
        new = np.arange(started, started + random.integers(0, 48 - len(stay) + 1) // random.integers(1, 6))
        rows, started = random.permutation(np.concatenate([stay, new])), started + len(new)
        size = bucket(len(rows))
        todo = order.assign(rows, size)
        there[todo.gone] = FREE
        if todo.moved is not None:
            assert there[todo.moved].min() != FREE
            there = np.concatenate([there[todo.moved], np.full(48 - len(todo.moved), FREE)])
            moves += 1
        assert (there[todo.places] == FREE).all(), "nobody is written over"
        there[todo.places] = rows[todo.joined]
        assert there.tolist() == order.numbers.tolist()
        assert sorted(there[:size][there[:size] != FREE]) == sorted(rows)
        assert todo.moved is None or len(stay) == len(todo.moved)
    assert moves > 5


def test_the_time_of_a_step_is_that_of_the_device(monkeypatch):
    """However late the host reads the results."""
    finished = Mock()
    begun = Mock(elapsed_time=lambda event: 400.0 if event is finished else -1.0)
    monkeypatch.setattr(async_rounds, "record_event", lambda device: finished)
    assert PendingResults(np.array([7]), [torch.zeros(1)], begun, 16).step_s == 0.025
    assert PendingResults(np.array([7]), [torch.zeros(1)], None, 16).step_s == 0.0  # on a CPU nothing is measured
