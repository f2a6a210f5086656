"""The compiled CPU kernels against their torch twins, and attention over the paged cache against the plain formula."""

import fcntl
import os
import subprocess

import pytest
import torch
import torch.nn.functional as F

from posttrain.kernels import compiled, decode
from posttrain.kernels.decode import BLOCK, FAR, StepTokens, new_cache
from posttrain.kernels.scores import ScoreChanges
from tests.machine import has_compiler

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler on this machine")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.03}


def ragged_step(prompts, responses):
    """Rows that share a prompt of some length and have responses of their own, and one row that is being prefilled."""
    table, starts, positions, rows, block = [], [], [], [], 0
    for prompt, lengths in zip(prompts, responses, strict=True):
        shared = list(range(block, block + -(-prompt // BLOCK)))
        block += len(shared)
        for length in lengths:
            own = list(range(block, block + -(-length // BLOCK)))
            block += len(own)
            table.append([*shared, *own])
            starts.append([*range(0, BLOCK * len(shared), BLOCK), *range(prompt, prompt + BLOCK * len(own), BLOCK)])
            rows.append(len(table) - 1)
            positions.append(prompt + length - 1)
    table.append(list(range(block, block + 3)))
    starts.append([0, BLOCK, 2 * BLOCK])
    rows += [len(table) - 1] * 50
    positions += range(20, 70)
    width = max(map(len, table))
    table = torch.tensor([row + [0] * (width - len(row)) for row in table], dtype=torch.int32)
    starts = torch.tensor([row + [FAR] * (width - len(row)) for row in starts], dtype=torch.int32)
    return StepTokens(
        torch.zeros(len(rows), dtype=torch.long),
        torch.tensor(positions, dtype=torch.int32),
        torch.tensor(rows, dtype=torch.int32),
        table,
        starts,
        max(positions) + 1,
    ), block + 3


CASES = {  # query heads, key heads, head size, window, norms, and in some a cap, and whether there are sinks
    "grouped": (4, 2, 32, None, False),
    "single": (4, 4, 64, None, False),
    "odd size": (6, 2, 20, None, True),
    "wide": (8, 1, 128, None, True),
    "window": (4, 2, 16, 11, False),
    "narrow window": (4, 2, 48, 1, True),
    "cap": (4, 2, 32, None, False, 2.0, False),
    "sinks": (6, 2, 16, 11, False, None, True),
    "cap and sinks": (4, 1, 40, None, True, 2.0, True),
}


def inputs(case, dtype):
    heads, keys, size, window, normed, cap, sinks = (*CASES[case], None, False)[:7]
    torch.manual_seed(0)
    step, blocks = ragged_step([40, 7, 64], [[1, 33, 70], [5, 5], [1, 2, 32]])
    cache = tuple(torch.randn(x.shape).to(dtype) for x in new_cache(blocks, keys, size, dtype, torch.device("cpu")))
    qkv = torch.randn(len(step.rows_T), heads + 2 * keys, size).to(dtype)
    angles = torch.randn(step.longest, size // 2).repeat(1, 2)
    norms = (torch.rand(size).to(dtype), torch.rand(size).to(dtype)) if normed else None
    options = {"scale": size**-0.5, "window": window, "rotation": (angles.cos(), angles.sin()), "norms": norms}
    options["changes"] = ScoreChanges(cap, 2 * torch.randn(heads).to(dtype) if sinks else None)
    return qkv.split([heads, keys, keys], 1), cache, step, {**options, "epsilon": 1e-6}


@needs_compiler
def test_where_there_is_a_compiler_the_kernels_are_compiled():
    assert compiled.why_not() is None


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_compiled_attention_equals_its_twin_outputs_and_cache(case, dtype, monkeypatch):
    results = []
    for use in (True, False):
        if not use:
            monkeypatch.setattr(decode, "kernel", lambda name, tensor: None)
        (query, key, value), cache, step, options = inputs(case, dtype)
        out = decode.attention(query, key, value, cache, step, **options)
        results.append((out, *cache))
    for ours, twin in zip(*results, strict=True):
        torch.testing.assert_close(ours.float(), twin.float(), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("case", ["grouped", "window", "cap", "sinks", "cap and sinks"])
def test_a_row_sees_its_prompt_then_its_response_and_nothing_else(case, monkeypatch):
    """One token at a time into a paged cache = plain causal attention over the whole row."""
    heads, keys, size, window, _, cap, sinks = (*CASES[case], None, False)[:7]
    torch.manual_seed(1)
    changes = ScoreChanges(cap, torch.randn(heads) if sinks else None)
    length, prompt = 75, 37
    query, key, value = (torch.randn(length, n, size) for n in (heads, keys, keys))
    cache = new_cache(5, keys, size, torch.float32, torch.device("cpu"))
    table = torch.tensor([[3, 0, 4, 1]], dtype=torch.int32)
    starts = torch.tensor([[0, BLOCK, prompt, prompt + BLOCK]], dtype=torch.int32)
    outputs = []
    for position in range(length):
        one = torch.tensor([position], dtype=torch.int32)
        step = StepTokens(torch.zeros(1, dtype=torch.long), one, torch.zeros(1, dtype=torch.int32), table, starts, 75)
        at = slice(position, position + 1)
        how = {"scale": 0.3, "window": window, "changes": changes}
        outputs.append(decode.attention(query[at], key[at], value[at], cache, step, **how))
    far = torch.arange(length)[:, None] - torch.arange(length)
    seen = (far >= 0) & (far < (window or length))
    k, v = (x.repeat_interleave(heads // keys, 1) for x in (key, value))
    scores = torch.einsum("qhd,lhd->hql", query, k) * 0.3
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    weights = scores.masked_fill(~seen, float("-inf")).exp()
    lost = torch.zeros(heads) if changes.sinks_H is None else changes.sinks_H.exp()  # what sinks take has no value
    plain = torch.einsum("hql,lhd->qhd", weights / (weights.sum(-1) + lost[:, None])[..., None], v)
    torch.testing.assert_close(torch.cat(outputs), plain.flatten(1), rtol=0, atol=2e-6)


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows, width", [(1, 7), (5, 64), (300, 200)])
def test_compiled_norm_and_gate_equal_torch(dtype, rows, width):
    torch.manual_seed(0)
    residual, added, weight = (torch.randn(shape).to(dtype) for shape in ((rows, width), (rows, width), (width,)))
    both = residual + added
    expected = F.rms_norm(both.float(), (width,), weight.float(), 1e-5)
    out = decode.add_rms_norm(residual, added, weight, 1e-5)
    assert torch.equal(residual, both)
    torch.testing.assert_close(out.float(), expected, rtol=0.01 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    gate_up = torch.randn(rows, 2 * width).to(dtype) * 30
    expected = F.silu(gate_up[:, :width].float()) * gate_up[:, width:].float()
    torch.testing.assert_close(decode.silu_mul(gate_up).float(), expected, rtol=0.01, atol=1e-5)


def test_results_do_not_depend_on_the_number_of_threads():
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        (query, key, value), cache, step, options = inputs("grouped", torch.float32)
        found.append(decode.attention(query, key, value, cache, step, **options))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    "change, reason",
    [({"POSTTRAIN_COMPILE": "0"}, "POSTTRAIN_COMPILE=0"), ({"PATH": "/nowhere"}, "no C++ compiler found")],
)
def test_without_a_compiler_the_twins_serve_and_the_reason_is_told(change, reason, forked):
    code = (
        "import torch\nfrom posttrain.kernels import compiled, decode\n"
        "x = torch.ones(2, 4); print(decode.silu_mul(x).shape, compiled.why_not())"
    )
    environment = {key: value for key, value in os.environ.items() if key != "CXX"} | change
    done = subprocess.run([forked.python, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "[2, 2]" in done.stdout and reason in done.stdout, done


def test_a_compiler_that_fails_is_no_crash(tmp_path, forked):
    wrong = tmp_path / "wrong-c++"
    wrong.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'no such option' >&2; exit 1\n")
    wrong.chmod(0o755)
    environment = os.environ | {"CXX": str(wrong), "POSTTRAIN_CACHE": str(tmp_path)}
    code = "from posttrain.kernels import compiled; print(compiled.why_not())"
    done = subprocess.run([forked.python, "-c", code], env=environment, capture_output=True, text=True)
    assert "wrong-c++ failed: no such option" in done.stdout and not list(tmp_path.glob("kernels/*"))


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_processes_that_start_together_compile_once(tmp_path, forked):
    code = """
import sys, time
from posttrain.kernels import compiled

def made(compiler, target):
    with open(sys.argv[1], "a") as calls:
        calls.write("one ")
    time.sleep(0.5)
    target.write_bytes(b"")

compiled._compile = made
print(compiled._library().name)
"""
    environment = os.environ | {"POSTTRAIN_CACHE": str(tmp_path / "cache")}
    command = [forked.python, "-c", code, str(tmp_path / "calls")]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(2)]
    first, second = [process.communicate()[0] for process in both]
    assert first == second and first.startswith(b"cpu-")
    assert (tmp_path / "calls").read_text() == "one "


def test_a_process_that_stopped_while_it_compiled_is_told_of_and_not_waited_for_for_ever(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compiled, "TELL_S", 0.1)
    monkeypatch.setattr(compiled, "WAIT_S", 0.3)
    holder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    try:
        with compiled._alone_in(tmp_path):
            pass
    finally:
        os.close(holder)
    assert capsys.readouterr().err == "Waiting for another process that compiles the CPU kernels ...\n"
    with compiled._alone_in(tmp_path):  # nobody has it
        pass
    assert capsys.readouterr().err == ""
