"""The work is drawn once, from a seed, and every system gets the same."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from posttrain.bench.contest import Bench, apply_options
from posttrain.bench.device import Device
from posttrain.bench.output import StatusLine
from posttrain.bench.rollout import WARM_UPS
from posttrain.bench.systems import ROLLOUT, STEP, choose
from posttrain.bench.training import make_job, model_with_end_tokens
from posttrain.bench.workload import PRESETS, find_model, make_workload, response_lengths
from posttrain.errors import UserError


def work(kind: str, **changed):
    sizes = {"prompts": 8, "n": 3, "prompt_tokens": 5, "tokens": 100, "vocab_size": 272}
    return make_workload(kind=kind, **{**sizes, **changed})


def test_long_tail_lengths_are_seeded_within_bounds_and_really_have_a_tail():
    lengths = response_lengths(2000, 256, "long-tail", seed=7)
    assert lengths == response_lengths(2000, 256, "long-tail", seed=7)
    assert lengths != response_lengths(2000, 256, "long-tail", seed=8)
    assert min(lengths) >= 1 and max(lengths) == 256
    assert 55 <= sorted(lengths)[1000] <= 73  # the median is a quarter of the longest
    assert 0.04 < sum(length == 256 for length in lengths) / 2000 < 0.13


def test_rows_are_prompts_times_n_and_a_group_shares_its_prompt():
    made = work("fixed")
    assert len(made.prompts) == len(made.lengths) == 24 and made.tokens == 2400
    assert all(made.prompts[3 * g] == made.prompts[3 * g + 1] == made.prompts[3 * g + 2] for g in range(8))
    assert len({tuple(prompt) for prompt in made.prompts}) == 8
    assert all(0 <= token < 256 for prompt in made.prompts for token in prompt)
    assert all(token < 40 for prompt in work("fixed", vocab_size=40).prompts for token in prompt)


def prepared(folder: Path, **options) -> Bench:
    return Bench(argparse.Namespace(**options), Device("cpu"), [], find_model(str(folder)), {}, None, StatusLine())


def test_every_system_is_given_the_same_rows(tiny: Path):
    given = prepared(tiny, threads=2)
    jobs = [given.job(system, works=[work("long-tail").lengths]) for system in ROLLOUT]
    assert len({json.dumps([job["works"], job["model"], job["dtype"], job["threads"]]) for job in jobs}) == 1
    assert [job["engine"] for job in jobs] == ["native", "hf", None, None, None]
    assert WARM_UPS >= 1


def test_the_steps_of_all_trainers_see_the_same_prompts(tiny: Path):
    given = prepared(
        tiny, prompts=4, n=8, tokens=16, prompt_tokens=32, lengths="fixed", steps=30, threads=2, model=str(tiny),
        budget=None, lora_rank=None, checkpointing=False, deadline=None,
    )  # fmt: skip
    jobs = [make_job(given, system, "m") for system in STEP]
    assert len({json.dumps({**job, "engine": None}) for job in jobs}) == 1
    assert len(jobs[0]["texts"]) == 4 * 30 and {len(text) for text in jobs[0]["texts"]} == {29}


def test_the_presets_have_the_sizes_that_they_are_called_by(own_cache: Path):
    assert PRESETS["1m"].parameters == 1_069_184 and PRESETS["27m"].parameters == 27_015_680
    model = find_model("1m")
    assert model.folder == own_cache / "bench" / "models" / "1m"
    assert (model.dtype, model.vocab_size) == ("float32", 272)
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model.folder)
    assert loaded.num_parameters() == 1_069_184
    written = (model.folder / "model.safetensors").stat().st_mtime_ns
    assert (find_model("1m").folder / "model.safetensors").stat().st_mtime_ns == written  # made once


def test_long_tails_of_steps_come_from_end_tokens_that_both_trainers_read(tiny: Path, tmp_path: Path):
    model = find_model(str(tiny))
    folder = model_with_end_tokens(model, 64, tmp_path)
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert len(ends) == round(model.vocab_size * 4 / 64)
    assert (folder / "model.safetensors").resolve() == (model.folder / "model.safetensors").resolve()


def test_settings_and_variables_of_one_system_can_be_changed():
    systems = choose(ROLLOUT, "generate,vllm")
    changed = apply_options(
        systems, ["vllm:LD_PRELOAD=", "vllm:A=b"], ["vllm:enforce_eager=true", "vllm:block_size=64"]
    )
    assert changed[0] == systems[0]
    assert apply_options(systems, ["generate:GOMP_SPINCOUNT="], [])[0].variables == {}
    assert changed[1].settings == {"enforce_eager": True, "block_size": 64}
    assert changed[1].preload is None and changed[1].variables == {**systems[1].variables, "A": "b"}
    *_, second = apply_options(systems, ["spawned:A=b"], [], ["spawned=vllm"])
    assert second.name == "spawned" and second.script == "run_vllm.py" and second.variables["A"] == "b"
    for wrong in ("vllm=generate", "x=hf", "a/b=vllm", "x"):
        with pytest.raises(UserError, match=r"--also .*: give NEWNAME=SYSTEM"):
            apply_options(systems, [], [], [wrong])
    for wrong in ("hf:A=b", "A=b", "vllm:A", "vllm:=b"):
        with pytest.raises(UserError, match="give SYSTEM:KEY=VALUE, SYSTEM being generate, vllm"):
            apply_options(systems, [wrong], [])


def test_only_names_known_systems():
    assert [system.name for system in choose(ROLLOUT, "vllm, hf")] == ["hf", "vllm"]
    with pytest.raises(UserError, match=r"--only names sglang; known: native, hf, generate"):
        choose(ROLLOUT, "sglang,hf")
    with pytest.raises(UserError, match="--only names nothing"):
        choose(ROLLOUT, ",")
    with pytest.raises(UserError, match="neither a preset"):
        find_model("no/such/folder")
