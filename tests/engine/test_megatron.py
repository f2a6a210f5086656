"""All registered train engines give what torch's gives; Megatron-Core's whole and cut by tensor, pipeline and expert
ranks.

The processes run once (`megatron_runs.py`) and all tests read what they found.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import CASES, FSDP, MIXTURES
from megatron_runs import ADAPTED, ELSEWHERE, RECUT
from megatron_runs import WHOLE as MODELS
from test_ranks import furthest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
CUT = [case for case in CASES if case[1] != FSDP]
WHOLE = [case for case in CUT if case[0] in MODELS]
"""Cases that go through all checks."""


@pytest.fixture(scope="module")
def found(tmp_path_factory, forked) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("megatron")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [forked.python, str(HERE / "megatron_runs.py"), str(folder)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return {file.stem: torch.load(file, weights_only=True) for file in folder.glob("*.pt")}


def both(found: dict[str, Any], case: tuple[str, str, int], check: str) -> tuple[Any, Any]:
    model, cut, ranks = case
    return found[f"{model} {FSDP} 1"][check], found[f"{model} {cut} {ranks}"][check]


def bound(case: tuple[str, str, int], check: str) -> float:
    """In float64; transformers computes norms and routing of mixtures in float32. Scores are sums of squares."""
    return (2e-3 if check == "scores" else 2e-4) if case[0] in MIXTURES else 1e-9


def named(case: tuple[str, str, int]) -> str:
    return f"{case[0]}-{case[1]}-on-{case[2]}"


@pytest.mark.parametrize("case", CUT, ids=named)
@pytest.mark.parametrize("check", ["scores", "updates"])
def test_log_probs_losses_gradients_and_weights_are_those_of_fsdp(found, case, check):
    assert furthest(*both(found, case, check)) < bound(case, check)


@pytest.mark.parametrize("case", [case for case in CUT if case[0] in MIXTURES and case[2] > 1], ids=named)
def test_mixtures_on_several_ranks_give_what_one_process_gives(found, case):
    one, many = found[f"{case[0]} megatron 1,1,1 1"], found[named_file(case)]
    assert furthest(one["updates"], many["updates"]) < 1e-9
    for kind, numbers in one["scores"].items():
        assert many["scores"][kind] == pytest.approx(numbers, rel=1e-9)


@pytest.mark.parametrize("case", WHOLE, ids=named)
@pytest.mark.parametrize(
    "check", ["other_passes", "clipped", "recomputed", "values", "pairs", "not_finite", "trial", "facts", "moved"]
)
def test_both_engines_pass_one_suite(found, case, check):
    assert furthest(*both(found, case, check)) < bound(case, check)


@pytest.mark.parametrize("case", [case for case in CASES if case[0] in MODELS], ids=named)
def test_rows_count_as_progress_when_their_pass_was_computed(found, case):
    assert found[named_file(case)]["progress"] == {"compute": 1.0, "update": 1.0}


@pytest.mark.parametrize("case", [case for case in CUT if case[1].startswith("megatron")], ids=named)
def test_ranks_hold_their_share_of_the_weights_and_of_the_tokens_of_a_pass(found, case):
    tensor, more = int(case[1].split()[1][0]), case[1].split()[2:]
    context = 2 if "context=2" in more else 1
    wanted = {"between layers": context * (1 if "sequence=0" in more else tensor), "in attention": context}
    ran = found[named_file(case)]["stretches"]
    assert ran.pop("weights") == pytest.approx(1.0, abs=0.01)  # the vocabulary may be filled up
    assert {name: round(share) for name, share in ran.items()} == wanted


@pytest.mark.parametrize("case", WHOLE, ids=named)
def test_the_suite_can_fail(found, case):
    ran = found[named_file(case)]
    assert furthest(ran["clipped"]["weights"], ran["updates"]["weights"]) > 1e-6
    assert ran["clipped"]["norms"][0] == pytest.approx(ran["updates"]["norms"][0], abs=1e-6)
    assert furthest(ran["other_passes"], ran["updates"]) < 1e-9
    assert ran["not_finite"] == {"skipped": 1.0, "same": 1.0} and ran["trial"] == {"left": 0.0, "same": 1.0}


def named_file(case: tuple[str, str, int]) -> str:
    return f"{case[0]} {case[1]} {case[2]}"


@pytest.mark.parametrize("case", WHOLE, ids=named)
def test_bfloat16_is_trained_over_float32_masters(found, case):
    one, other = both(found, case, "bfloat16")
    assert furthest(one["losses"], other["losses"]) < 0.05
    assert furthest(one["weights"], other["weights"]) < 0.02


@pytest.mark.parametrize("case", CUT, ids=named)
def test_a_run_goes_on_from_a_checkpoint_to_the_bit_and_its_export_is_the_model(found, case):
    ran = found[named_file(case)]
    assert ran["resumed"] == {"same": 1.0} and ran["exported"] == {"same": 1.0}


@pytest.mark.parametrize("case", [case for case in CUT if case[0] in (*MODELS, *ADAPTED)], ids=named)
def test_adapters_train_as_in_the_torch_engine_and_resume_bitwise(found, case):
    wanted, ran = both(found, case, "adapters")
    assert furthest(wanted["scores"], wanted["base"]) > 1.0  # they change what the model says
    assert furthest(wanted, ran) < bound(case, "scores") and ran["resumed"] == 1.0
    if case[2] > 1:
        one = found[f"{case[0]} megatron 1,1,1 1"]["adapters"]
        assert furthest(one["updates"], ran["updates"]) < 1e-9


def test_two_copies_of_a_model_hold_half_of_the_moments_each_and_step_alike(found):
    ran = found["recut"]["moments"]
    assert ran["share False"] == 1.0 and 0.3 < ran["share True"] < 0.7
    assert all(torch.equal(weight, ran["weights False"][name]) for name, weight in ran["weights True"].items())


@pytest.mark.parametrize("cut", ["megatron 1,2,1", "megatron 1,1,1"])
@pytest.mark.parametrize("model", RECUT)
def test_a_checkpoint_is_continued_with_other_tensor_ranks(found, model, cut):
    ran = found["recut"][model]
    assert furthest(ran["megatron 2,1,1"], ran[cut]) < 1e-9


@pytest.mark.parametrize("ranks", ELSEWHERE)
@pytest.mark.parametrize("model", RECUT)
def test_a_checkpoint_of_two_ranks_is_continued_by_another_number_of_them(found, model, ranks):
    assert furthest(found["recut"][model]["megatron 2,1,1"], found[f"recut on {ranks}"][model]) < 1e-9


@pytest.mark.parametrize(
    ("what", "words"),
    {
        "ranks": "tensor_parallel_size=2 x pipeline_parallel_size=1 = 2 ranks",
        "expert ranks": "expert_parallel_size=2: experts are dealt out over the 1 ranks",
        "heads": "tensor_parallel_size=8: the model has 4 heads of queries",
        "layers": "pipeline_parallel_size=3: the model has 2 layers, which do not fill 3 stages",
        "chunks": "the model has 2 layers, which do not fill 2 stages with 2 chunks of at least one each",
        "context": "context_parallel_size=3: ranks that share the tokens of a pass divide its heads",
        "dense": "is dense, it has no experts",
        "experts": "expert_parallel_size=3: the model has 4 experts",
        "padded": "use_remove_padding=false",
        "adapters": "target_modules: adapters on lm_head are not built",
    }.items(),
)
def test_what_cannot_be_is_refused_with_what_to_do(found, what, words):
    said = found["refusals"][what]
    assert words in said and ("set " in said)
