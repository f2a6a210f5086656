"""A run's products are made by one library from its first step to its last."""

from types import SimpleNamespace

import torch

from posttrain.engine import ranks
from posttrain.trainer.run import process

CODE = """
import torch
from posttrain.kernels.ordered import fix_product_library

fix_product_library()
x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
before = torch.nn.functional.linear(x, x, x[0])
torch.nn.functional.linear(x.bfloat16(), x.bfloat16(), x[0].bfloat16())
print(torch.equal(before, torch.nn.functional.linear(x, x, x[0])), torch.backends.mkldnn.enabled)
"""


def test_a_product_in_bfloat16_does_not_change_those_in_float32_that_follow(forked):
    done = forked.run(CODE)
    assert done.stdout.split()[:1] == ["True"] and done.stderr == "", done


def test_every_process_that_computes_on_a_cpu_settles_them_before_its_first_step(monkeypatch):
    settled = []
    monkeypatch.setattr(process, "fix_product_library", lambda: settled.append("run"))
    monkeypatch.setattr(ranks, "fix_product_library", lambda: settled.append("rank"))
    monkeypatch.setattr(ranks.dist, "init_process_group", lambda *args, **named: settled.append("met"))
    monkeypatch.setattr(ranks, "_store", lambda *_: None)
    trainer = SimpleNamespace(seed=1, deterministic=False)
    process.prepare_torch(trainer, torch.device("cpu"))
    ranks.join_ranks(1, 2, "127.0.0.1:1", torch.device("cpu"))
    assert settled == ["run", "rank", "met"]
