"""`posttrain selftest`: what it says of a machine that is right, and that it names each of twelve planted faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from selftest_faults import launcher

from posttrain.errors import UserError
from posttrain.models.embedded import write_model
from posttrain.selftest import command
from posttrain.selftest.command import Report, Result
from posttrain.selftest.runs import Runs, kill, why_not

HERE = Path(__file__).parent
NAMED = {
    "shuffled ranks": ("collectives", "the order of ranks is wrong"),
    "missing sync": ("native sync", "the rollout still computes with the weights before the update"),
    "stale adapter": ("native adapters", "the rollout still computes with the adapters before the update"),
    "gradient scale": ("fsdp2", "gradient norms over 2 ranks are 0.5"),
    "dropped bucket": ("native sync", "weights never reached the rollout"),
    "swapped slices": ("native rollout", "a rank holds another part of a matrix than its own"),
    "optimizer not saved": ("resume", "the state of the optimizer is not what was saved"),
    "random numbers": ("resume", "random numbers after a resume are not those that would have followed"),
    "hanging rank": ("collectives", "rank 1 did not answer"),
    "dying rank": ("collectives", "rank 1 died"),
    "broken device": ("devices", "rank 1 computes other numbers than rank 0"),
}


def selftest(
    folder: Path, *args: str, python: str | Path = sys.executable, fault: str = ""
) -> tuple[int, dict[str, Any], str]:
    """(exit status, the report's data, its page), run as a stranger would: without the tests' folder."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1", "PLANTED_FAULT": fault}
    words = [python, "-m", "posttrain", "selftest", "--out", str(folder / "report"), *args]
    ended = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert (folder / "report" / "selftest.json").exists(), ended.stdout[-2000:] + ended.stderr[-2000:]
    data = json.loads((folder / "report" / "selftest.json").read_text())
    return ended.returncode, data, (folder / "report" / "selftest.md").read_text()


@pytest.fixture
def python(forked, tmp_path):
    return launcher(tmp_path, forked.python)


@pytest.mark.slow
def test_a_wrong_sum_is_named_and_the_checks_after_it_still_run(tmp_path, python):
    checks = ("--ranks", "2", "--only", "collectives, devices")
    status, data, page = selftest(tmp_path, *checks, python=python, fault="wrong reduce")
    found = {result["check"]: result for result in data["results"]}
    assert status == 1 and found["collectives"]["status"] == "failed" and found["devices"]["status"] == "passed"
    assert "all_reduce" in found["collectives"]["problem"] and "a sum over ranks is wrong" in page
    assert data["environment"]["torch"] and "2 CPU ranks" in page
    assert str(tmp_path) not in page and os.uname().nodename not in json.dumps(data)


@pytest.mark.slow
def test_a_machine_that_is_right_passes_every_check_of_its_ranks(tmp_path):
    names = "collectives,devices,fsdp2,hsdp,sequence,lora,resume,native rollout,native sync,native adapters"
    status, data, _ = selftest(tmp_path, "--ranks", "4", "--only", names)
    assert [result["problem"] for result in data["results"] if result["problem"]] == []
    assert status == 0 and {result["status"] for result in data["results"]} == {"passed"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", NAMED)
def test_a_planted_fault_is_named(tmp_path, python, fault):
    check, said = NAMED[fault]
    checks = ("--ranks", "2", "--only", check, "--limit", "20" if fault == "hanging rank" else "60")
    status, data, _ = selftest(tmp_path, *checks, python=python, fault=fault)
    (result,) = data["results"]
    assert status == 1 and result["status"] == "failed" and said in result["problem"]


def test_sizes_that_this_machine_does_not_have_are_rejected(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert command._sizes(None, None) == (4, 4)
    assert command._sizes(1, None) == (1, 2), "one GPU is shared by two ranks"
    assert command._sizes(None, 3) == (0, 3)
    with pytest.raises(UserError, match="--gpus 5: this machine has 4"):
        command._sizes(5, None)
    with pytest.raises(UserError, match="on several GPUs there is one rank on each"):
        command._sizes(2, 3)
    with pytest.raises(UserError, match=r"--only colectives: there is no such check; known: collectives, "):
        command.main(["--only", "colectives"])


def test_the_heads_of_the_tiny_model_are_as_wide_as_the_attention_of_other_packages_takes(tmp_path):
    """vLLM 0.26 accesses invalid memory on CUDA with heads of 32 numbers."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(write_model(tmp_path / "model", **command.MODEL))
    assert config.hidden_size // config.num_attention_heads >= 64
    assert config.num_attention_heads % 4 == config.num_key_value_heads % 4 == 0  # four ranks divide them


def test_the_command_names_its_checks(capsys):
    assert command.main(["--list"]) == 0
    said = capsys.readouterr().out
    assert "native sync" in said and "killed rank" in said


def test_a_rank_that_says_nothing_is_named_before_the_errors_of_those_that_waited(tmp_path):
    test = command.SelfTest(0, 3, tmp_path, 60.0)
    waited = {"error": {"text": "connection closed", "own": False}, "facts": [], "seconds": 30.0}
    found = test._result("collectives", "", {0: waited, 2: waited}, [], 31.0)
    assert found.problem == "rank 1 did not answer within 60 s: it hangs"
    own = {**waited, "error": {"text": "a sum is wrong", "own": True}}
    assert test._result("collectives", "", {0: waited, 2: own}, [], 31.0).problem == "rank 2: a sum is wrong"


def test_a_report_has_a_row_for_each_check_and_a_summary(tmp_path):
    report = Report("2 CPU ranks", "posttrain selftest", environment={"torch": "2.13"})
    report.results = [Result("a", "", "passed", 1.0, ["x|y"]), Result("b", "", "failed", problem="it is wrong")]
    data, page = report.write(tmp_path)
    assert (
        "# posttrain selftest: 1 passed, 1 failed" in page.read_text()
        and "| a | passed | 1.0 | x/y |" in page.read_text()
    )
    assert json.loads(data.read_text())["results"][1]["problem"] == "it is wrong"


def test_a_run_that_loses_a_rank_is_asked_to_end_and_not_to_start_it_again(tmp_path, monkeypatch):
    runs, given = Runs(tmp_path, 2, 0, 5.0), []

    def started(words, **_):
        given.extend(words)
        raise InterruptedError

    monkeypatch.setattr("posttrain.selftest.runs.subprocess.Popen", started)
    with pytest.raises(InterruptedError):
        kill(runs)
    assert "trainer.max_restarts=0" in given


def test_a_rank_is_killed_only_where_a_run_has_ranks():
    assert "one process" in (why_not("killed rank", 1) or "")
    assert why_not("killed rank", 2) is None and why_not("run", 1) is None


def test_another_package_in_megatrons_namespace_is_not_megatron_core(monkeypatch):
    from posttrain.selftest.checks import CHECKS

    monkeypatch.setattr("posttrain.engine.megatron.settings.is_installed", lambda: False)
    assert "megatron-core is not installed" in (CHECKS["megatron"].needs(2) or "")
