"""How ranks meet: which GPU they take, and by what they talk."""

from __future__ import annotations

import pytest
import torch
from torch.cuda._utils import _get_device_index

from posttrain.engine import ranks
from posttrain.engine.ranks import join_ranks


@pytest.mark.parametrize("name, gpu", [("cuda", 0), ("cuda:1", 1)])
@pytest.mark.parametrize("asked, backend", [(None, "nccl"), ("gloo", "gloo")])
def test_a_rank_on_a_gpu_takes_the_one_it_is_shown_and_meets_by_nccl_or_as_it_is_told(
    monkeypatch, name, gpu, asked, backend
):
    taken, met = [], []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: taken.append(_get_device_index(device)))
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda kind, **named: met.append((kind, named["rank"]))
    )
    monkeypatch.setattr(ranks, "_store", lambda *_: None)
    join_ranks(1, 2, "127.0.0.1:1", torch.device(name), backend=asked)
    assert taken == [gpu] and met == [(backend, 1)]
