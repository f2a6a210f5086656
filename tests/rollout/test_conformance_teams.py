"""The conformance suite over engines that two workers hold together: two processes run it in lock step."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.rollout import test_conformance as suite

NO_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
VLLM = [pytest.param(name, marks=NO_VLLM) for name in ("vllm-by-two", "vllm-two-stages")]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native-by-two", *VLLM])
def test_two_workers_that_hold_one_engine_pass_the_suite(engine, tmp_path, forked):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    words = [forked.python, "-m", "pytest", "-x", "-p", "no:cacheprovider", suite.__file__, "-k", engine]
    logs = Path(os.environ.get("CONFORMANCE_LOGS", tmp_path))  # scripts/compatibility.py counts what passed
    ranks = []
    for rank in range(2):
        environment = {**os.environ, suite.TEAM: f"{rank} 2 {address}", "OMP_NUM_THREADS": "1"}
        log = (logs / f"rank_{rank}.log").open("w")
        own = [*words, f"--basetemp={tmp_path / str(rank)}"]
        ranks.append(subprocess.Popen(own, env=environment, stdout=log, stderr=log, cwd=Path(__file__).parents[2]))
    ends = [rank.wait(900) for rank in ranks]  # vLLM starts 15 times, on cores that others may use
    said = [(logs / f"rank_{rank}.log").read_text() for rank in range(2)]
    assert ends == [0, 0], "\n".join(text[-3000:] for text in said)
    assert all(re.search(r"\b(1[0-9]|[2-9][0-9]) passed", text) for text in said), said
    assert not any(re.search(r"\d+ skipped", text) for text in said), said
