"""`kill -9` of the trainer ends its reward workers, what they have started, and the sandbox with its programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from patience import alive, gone, until

from posttrain.sandbox import Sandbox
from tests.machine import warm

OWN = """
    def reward(response, ground_truth):
        import subprocess
        subprocess.Popen(["sleep", "60"]).wait()
    spec = resolve_reward(CustomRewardConfig(), function=reward)
    item = RewardItem("", "", "")
"""
PROGRAM = """
    spec = RewardSpec()
    item = RewardItem("code", "```python\\nimport os, time\\nos.fork()\\ntime.sleep(60)\\n```", ["assert True"])
"""
VICTIM = """
    import time
    from posttrain.config.rollout import CustomRewardConfig
    from posttrain.rewards import RewardItem, RewardPool, RewardSpec, resolve_reward
    {work}
    pool = RewardPool(spec, num_workers=1, timeout_s=60)
    pool.submit(0, item)
    time.sleep(60)
"""


def below(pid: int) -> set[int]:
    """All processes that a process started, and those that these started."""
    found: set[int] = set()
    pending = [pid]
    while pending:
        for children in Path(f"/proc/{pending.pop()}/task").glob("*/children"):
            try:
                new = set(map(int, children.read_text().split())) - found
            except OSError:
                continue
            found |= new
            pending += new
    return found


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


# worker + guardian + sleep; worker + guardian + launcher + template + job's first process + program and its child
@pytest.mark.parametrize(("work", "processes"), [(OWN, 3), (PROGRAM, 7)], ids=["own program", "sandbox"])
def test_kill_9_of_the_trainer_leaves_no_process(tmp_path, work, processes):
    with warm(Sandbox()):
        pass
    script = tmp_path / "victim.py"
    script.write_text(dedent(VICTIM).format(work=dedent(work)))
    victim = subprocess.Popen([sys.executable, str(script)])
    try:
        until(lambda: len(below(victim.pid)) >= processes, "for its processes")
        started = below(victim.pid)
    finally:
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
    assert gone(*started, seconds=10), [command(pid) for pid in started if alive(pid)]
