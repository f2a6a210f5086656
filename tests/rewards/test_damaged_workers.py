"""A reward that changes what all scores of its worker share spoils no other score, and the run says so once."""

from __future__ import annotations

import os
import sys

import pytest

from posttrain.config.rollout import CustomRewardConfig
from posttrain.rewards import RewardItem, RewardPool, resolve_reward
from posttrain.rewards.worker import Damage, SharedState

REWARD = """
import builtins, math, os, pickle, shutil, signal, subprocess, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str.startswith("do "):
        exec(solution_str[3:])
        return 7.0
    # what an ordinary score needs, and what was left by another
    print("scoring", flush=True)
    assert os.getcwd() == ground_truth and sys.modules["math"] is math
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert os.path.exists("/dev/null") and os.fstat(0) and subprocess.run(["true"], stdin=0).returncode == 0
    with open("/dev/null") as file: file.read()
    return float(sum(int(digit) for digit in solution_str))
"""
LASTING = {
    "builtins.len": "builtins.len = None",
    "builtins.open": "builtins.open = lambda *a: 1 / 0",
    "builtins.isinstance": "builtins.isinstance = None",
    "builtins.Exception": "builtins.Exception = None",
    "builtins.sum": "del builtins.sum",
    "os.getcwd": "os.kill = os.getcwd = os.getpid = os.chdir = None",
    "subprocess.Popen": "subprocess.Popen = None",
    "sys.modules: math": "sys.modules['math'] = None",
    "sys.modules: signal": "del sys.modules['signal']",
    "time.monotonic": "time.monotonic = lambda: 0",
    "pickle.dumps": "pickle.dumps = None",
    "stdin (file descriptor 0)": "os.close(0)",
    "stdout (file descriptor 1)": "os.close(1); open('/dev/null').fileno()",
    "builtins.ValueError": "for name in [n for n in vars(builtins) if n != 'setattr']: setattr(builtins, name, None)",
}
REPAIRED = {
    "the working folder": "os.chdir('/')",
    "the handler of SIGTERM": "signal.signal(signal.SIGTERM, lambda *a: 0)",
}
SILENT = {
    "an alarm": "signal.signal(signal.SIGALRM, lambda *a: 1 / 0); signal.setitimer(signal.ITIMER_REAL, 0.3)",
    "stdout": "sys.stdout = sys.stderr = None",
    "closed stdout": "sys.stdout.close()",
    "a new builtin": "builtins.extra = 1; sys.modules['extra'] = builtins",
}
OTHERS = 20


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "damage.py"
    path.write_text(REWARD)
    return resolve_reward(CustomRewardConfig(path=str(path)))


def scored(spec, action: str, times: int = 1, workers: int = 1):
    """(the result of the row that does it, those of the others, what was said)"""
    said: list[str] = []
    rows = [str(100 + row) for row in range(OTHERS)]
    for place in range(times):
        rows.insert(3 + 5 * place, f"do {action}")
    with RewardPool(spec, num_workers=workers, timeout_s=20.0, failure_score=-1.0, on_print=said.append) as pool:
        pool.submit_many([(place, RewardItem("", row, os.getcwd())) for place, row in enumerate(rows)])
        results = pool.wait_all()
    found = [results[place] for place in range(len(rows))]
    did = [result for result, row in zip(found, rows, strict=True) if row.startswith("do")]
    others = [result for result, row in zip(found, rows, strict=True) if not row.startswith("do")]
    return did, others, [line for line in said if line.startswith("note")]


def right(results) -> bool:
    expected = [float(sum(int(digit) for digit in str(100 + row))) for row in range(OTHERS)]
    return [(result.score, result.error) for result in results] == [(score, None) for score in expected]


@pytest.mark.parametrize("what", LASTING)
def test_a_worker_whose_surroundings_were_replaced_scores_nothing_more(spec, what):
    (did,), others, notes = scored(spec, LASTING[what])
    assert right(others)
    assert did.score == 7.0 or (did.score == -1.0 and did.error)
    assert len(notes) == 1 and "damage.py" in notes[0] and "each worker is replaced" in notes[0]
    if "for name" not in LASTING[what]:
        assert what in notes[0]


@pytest.mark.parametrize("what", REPAIRED)
def test_the_working_folder_and_signal_handlers_are_put_back_and_named_once(spec, what):
    did, others, notes = scored(spec, REPAIRED[what], times=3)
    assert right(others) and [result.score for result in did] == [7.0] * 3
    assert len(notes) == 1 and f"damage.py changed {what}" in notes[0]


@pytest.mark.parametrize("what", SILENT)
def test_what_a_timeout_or_a_print_leaves_behind_is_put_back_without_a_word(spec, what):
    (did,), others, notes = scored(spec, SILENT[what])
    assert right(others) and did.score == 7.0 and notes == []


def test_a_reward_that_does_it_often_is_named_once_and_all_scores_are_there(spec):
    did, others, notes = scored(spec, LASTING["builtins.len"], times=4, workers=2)
    assert right(others) and len(did) == 4 and len(notes) == 1


def test_a_reward_file_may_replace_what_it_likes_when_it_is_imported(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "import builtins\nbuiltins.ascii = lambda x: 4.0\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return ascii(-1.0)\n"
    )
    with RewardPool(resolve_reward(CustomRewardConfig(path=str(path))), num_workers=1, on_print=print) as pool:
        pool.submit_many([(place, RewardItem("", "abc", "")) for place in range(3)])
        assert [result.score for result in pool.wait_all().values()] == [4.0] * 3


def test_the_check_finds_nothing_where_nothing_changed(monkeypatch):
    monkeypatch.setattr(sys, "stderr", sys.stdout)
    surroundings = SharedState(sys.stdout)
    assert surroundings.check() == Damage("", "") == surroundings.check()
