"""What differs on a CUDA device, as far as it can be seen without one."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import pytest

from posttrain.bench.contest import Contest, Entry
from posttrain.bench.device import Device, decoding_floor, find_chip, find_device, shape_of, update_flops
from posttrain.bench.ours.training import peak
from posttrain.bench.output import StatusLine
from posttrain.bench.systems import PEERS, ROLLOUT, STEP_CUDA, System
from posttrain.bench.training import update_figures
from posttrain.bench.workload import PRESETS, WORKS, Workload, fill_in_sizes, response_lengths
from posttrain.models.embedded import byte_tokenizer

H200 = Device("cuda", "NVIDIA H200", 150 << 30)
BY_NAME = {system.name: system for system in (*ROLLOUT, *STEP_CUDA)}


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_chips_are_known_by_the_names_that_their_drivers_give(name, chip):
    found = find_chip(name)
    assert (found and found.name) == chip


def test_real_shapes_have_the_parameters_of_the_models_that_they_stand_for():
    counts = {name: PRESETS[name].parameters for name in ("0.1b", "0.5b", "1.5b", "7b")}
    assert counts["0.5b"] == 494_032_768 and counts["1.5b"] == 1_543_714_304 and counts["7b"] == 7_615_616_512
    assert 0.1e9 < counts["0.1b"] < 0.14e9


def test_a_filled_tokenizer_has_a_text_for_every_token_and_cuts_texts_into_bytes():
    tokenizer, plain = byte_tokenizer(600), byte_tokenizer()
    assert len(tokenizer) == 600 and len({tokenizer.decode([number]) for number in range(256, 595)}) == 339
    text = "three blue 17 é"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(plain.encode(text)) == len(text.encode())


def test_sizes_come_from_the_work_and_what_is_given_goes_before():
    def settled(place: Device, **given) -> argparse.Namespace:
        options = argparse.Namespace(
            **{**dict.fromkeys(("prompts", "n", "tokens", "prompt_tokens", "lengths")), **given}
        )
        fill_in_sizes(options, place)
        return options

    there = settled(H200, job="rollout", work=None, n=4)
    assert (there.prompts, there.n, there.prompt_tokens, there.tokens, there.slots) == (128, 4, 128, 512, None)
    tail = settled(H200, job="rollout", work="tail")
    assert (tail.prompts * tail.n, tail.tokens, tail.mean_tokens, tail.slots) == (4096, 2048, 256, 1024)
    assert settled(Device("cpu"), job="rollout", work=None).prompts == 64
    assert all(work.keys() <= {*tail.__dict__, "steps"} for known in WORKS.values() for work in known.values())


def test_drawn_lengths_have_the_mean_that_was_asked_for():
    lengths = response_lengths(20_000, 2048, "long-tail", mean=256)
    assert sum(lengths) / len(lengths) == pytest.approx(256, rel=0.03) and max(lengths) == 2048


def test_the_floors_of_decoding_and_of_an_update():
    config = {"hidden_size": 4, "num_attention_heads": 2, "num_hidden_layers": 3, "num_key_value_heads": 1}
    shape = shape_of({**config, "intermediate_size": 8, "vocab_size": 10}, "bfloat16")
    prompts, lengths = [[1, 2], [1, 2], [3, 4]], [2, 2, 2]
    seen = 3 * (2 * 2 + 1 + 2)
    read = 2 * (shape.weights * 2 + seen * 2 * 3 * 1 * 2)
    assert decoding_floor(shape, prompts, lengths, slots=None, peak=1e30, bandwidth=1.0) == read
    by_one = decoding_floor(shape, prompts, lengths, slots=1, peak=1e30, bandwidth=1.0)
    assert by_one - read == 2 * shape.weights * 4, "with one slot the weights are read six times"
    flops = 2 * shape.weights * (6 + 4) + 4 * 3 * 4 * seen
    assert decoding_floor(shape, prompts, lengths, slots=None, peak=1.0, bandwidth=1e30) == flops
    assert update_flops(shape, [5, 5]) == 10 * (6 * shape.weights + 6 * 3 * 4 * 5)
    assert update_flops(shape, [2, 6]) == 8 * 6 * shape.weights + 6 * 3 * 4 * (4 + 36)
    assert update_flops(shape, [2, 6], frozen=True) == 8 * 4 * shape.weights + 6 * 3 * 4 * (4 + 36)


@pytest.mark.parametrize(("rank", "factor"), [(None, 6), (32, 4)])
def test_a_frozen_base_has_no_gradient_in_the_floors_and_a_groups_prompt_is_updated_once(rank, factor):
    from posttrain.bench import training

    config = {"hidden_size": 4, "num_attention_heads": 2, "num_hidden_layers": 3, "num_key_value_heads": 1}
    shape = shape_of({**config, "intermediate_size": 8, "vocab_size": 10}, "bfloat16")
    sizes = {"prompts": 2, "n": 3, "prompt_tokens": 4, "tokens": 5, "lengths": "fixed", "lora_rank": rank}
    bench = argparse.Namespace(place=H200, shape=shape, options=argparse.Namespace(**sizes))
    rates = {"peak": H200.chip.flops, "bandwidth": H200.chip.bandwidth}
    decoding = decoding_floor(shape, [[row // 3] * 4 for row in range(6)], [5] * 6, slots=None, **rates)
    whole = 6 * 9 * factor * shape.weights + 6 * 3 * 4 * 6 * 9**2
    assert training.update_floor(bench, Workload([[1] * 4] * 6, [5] * 6)) == pytest.approx(whole / rates["peak"])
    once = 2 * (4 + 3 * 5) * factor * shape.weights + 6 * 3 * 4 * (6 * 9**2 - 4 * 4**2)
    assert training.step_floor(bench) == pytest.approx(decoding + once / rates["peak"])


def test_the_share_of_the_chip_is_that_of_the_best_update_and_of_the_tokens_computed(monkeypatch):
    from posttrain.bench import training

    monkeypatch.setattr(training, "update_floor", lambda bench, work: 0.5)
    answers = [{"seconds": s, "computed": 60, "peak_gib": s} for s in (2.0, 1.0, 4.0)]
    found = update_figures(None, Workload([[1] * 10] * 4, [15] * 4), Entry(BY_NAME["native"], {}, answers))  # pyright: ignore
    assert found == {"best": 1.0, "median": 2.0, "mfu": 0.5, "mfu_counted": 0.3, "peak_gib": 4.0}


def test_on_a_device_systems_run_one_after_the_other_and_each_is_kept_when_it_is_done(monkeypatch, own_cache: Path):
    order: list[str] = []
    script = (
        "import json,sys\nname=json.load(open(sys.argv[1]))['name']\nprint(json.dumps({'ready':{}}),flush=True)\n"
        "for line in sys.stdin: print(json.dumps({'name':name}),flush=True)\n"
    )

    class Fake(System):
        def command(self, job: Path, module: str, kind: str = "cpu") -> list[str]:
            order.append(f"{self.name} on {kind}")
            return [sys.executable, "-c", script, str(job)]

    kept: list[list[int]] = []

    def contest(place: Device) -> Contest:
        keep = lambda entries: kept.append([len(entry.answers) for entry in entries])  # noqa: E731
        return Contest("rollout", place, 1, repeat=2, warm_ups=1, line=StatusLine(), keep=keep, warm_up={"most": 64})

    ours, peer = Fake("a", "", engine="native"), Fake("b", "", script="b.py")
    systems = [ours, peer, System("gone", "", script="x.py", needs="no_such_package")]
    entries = contest(H200).measure(systems, lambda system: {"name": system.name})
    assert order == ["a on cuda", "b on cuda"] and kept == [[2, 0, 0], [2, 2, 0], [2, 2, 0]]
    assert [entry.problem for entry in entries] == [None, None, "not installed here (--python)"]
    assert [entry.facts["warm_ups"][0].get("most") for entry in entries[:2]] == [None, 64], "a peer's is short"
    assert not any("most" in answer for entry in entries[:2] for answer in entry.answers)
    kept.clear()
    contest(Device("cpu")).measure(systems[:2], lambda system: {"name": system.name})
    assert kept == [[2, 2]]


def test_a_peer_on_a_device_finds_what_we_find_or_runs_in_the_python_that_is_given(tmp_path: Path, monkeypatch):
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").touch()
    peer = BY_NAME["verl"]
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert peer.why_missing("cuda") == "not installed here (--python)"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert peer.why_missing("cuda") is None and peer.command(Path("j"), "step", "cuda")[0] == sys.executable
    from posttrain.bench.contest import apply_options

    (elsewhere,) = apply_options([peer], [], [], [], ["verl=/no/such/python"])
    assert elsewhere.command(Path("j"), "step", "cuda")[0] == "/no/such/python"
    assert "No such file" in str(elsewhere.why_missing("cuda"))
    (changed,) = apply_options([peer], ["verl:PYTHONPATH=/x"], [])
    assert changed.variables_for(1, "cuda")["PYTHONPATH"] == "/x"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in BY_NAME["vllm"].variables_for(1, "cuda")
    assert BY_NAME["trl"].variables_for(1, "cuda")["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_the_steps_that_verl_prints_are_read(monkeypatch):
    monkeypatch.syspath_prepend(str(PEERS))
    numbers = importlib.import_module("run_verl").numbers
    line = "(TaskRunner pid=7) step:3 - timing_s/gen:1.5 - response_length/mean:np.float64(512.0) - timing_s/step:2e+01"
    found = numbers(line)
    assert found["step"] == 3 and found["timing_s/gen"] == 1.5
    assert found["response_length/mean"] == 512.0 and found["timing_s/step"] == 20.0


def test_verl_is_asked_for_the_work_that_the_others_do(monkeypatch):
    """No reference, no KL, no second pass for old log-probs, one optimizer step of all rows."""
    monkeypatch.syspath_prepend(str(PEERS))
    job = {"prompts": 4, "n": 8, "prompt_tokens": 16, "tokens": 32, "model": "m"}
    job |= {"checkpointing": False, "lora_rank": 0}
    job |= {"lr": 1e-5, "weight_decay": 0.0, "lengths": "fixed", "steps": 2, "settings": {}}
    given = importlib.import_module("run_verl").overrides(job, Path("folder"), Path("reward.py"))
    assert given["algorithm.rollout_correction.bypass_mode"] is True
    assert given["actor_rollout_ref.actor.use_kl_loss"] is given["algorithm.use_kl_in_reward"] is False
    assert given["actor_rollout_ref.actor.ppo_mini_batch_size"] == given["data.train_batch_size"] == 4
    assert given["actor_rollout_ref.rollout.ignore_eos"] is True and given["actor_rollout_ref.rollout.n"] == 8


def test_verl_cut_off_tells_how_far_it_came(monkeypatch):
    """Its own processes may hold the pipe after it was ended; a second step that is missing leaves the first."""
    monkeypatch.syspath_prepend(str(PEERS))
    follow = importlib.import_module("run_verl").follow
    held = ["sh", "-c", 'echo "$0"; sleep 5 & sleep 9']
    told = "(pid=7) stages begin\n(pid=7) stage gen: 26.210 s\n(pid=7) stage old_log_prob: 26.5 s"
    with pytest.raises(RuntimeError, match=r"start \d s, gen 26.2 s, old_log_prob 26.5 s"):
        follow([*held, told], 1.0)
    step = "step:1 - timing_s/gen:1.5 - timing_s/step:4.0 - response_length/mean:512.0"
    found = follow([*held, f"{told}\n{step}"], 1.0)
    assert found["wall"] == found["inside"] == [4.0] and found["stages"]["timing_s/gen"] == [1.5]


def test_a_device_that_is_not_there_is_said():
    import torch

    if torch.cuda.is_available():
        assert find_device("cuda").kind == find_device("auto").kind == "cuda"
        return
    from posttrain.errors import UserError

    assert find_device("auto").kind == "cpu"
    with pytest.raises(UserError, match="--device cuda: torch sees no CUDA device here; give --device cpu"):
        find_device("cuda")


def test_the_peak_of_a_contest_of_steps_is_that_of_its_fullest_step_in_binary_units():
    lines = [{"perf/memory_gb": 3.0}, {"perf/memory_gb": 8.589934592}, {"perf/memory_gb": 5.0}]
    assert peak(lines) == pytest.approx(8.0, abs=1e-9)
