"""Quick responses are scored in chunks: exactly the one that fails is blamed, what was done before it is kept."""

import os
import socket
import time
from collections import Counter

import pytest
from patience import until

from posttrain.config.rollout import CustomRewardConfig
from posttrain.machines.channel import Channel
from posttrain.rewards import RewardItem, RewardPool, resolve_reward

BEHAVIOURS = """
import ctypes, os, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if ground_truth:
        with open(ground_truth, "a") as file:
            file.write(f"{solution_str}\\n")
    word = solution_str.split()[-1]
    if word == "hang": time.sleep(60)
    if word == "tenth": time.sleep(0.1)
    if word == "raise": raise ValueError("bad answer")
    if word == "exit": os._exit(5)
    if word == "segfault": ctypes.string_at(0)
    if word == "close": os.closerange(3, 256)
    if word == "fork" and os.fork() == 0: sys.exit(1)
    if word == "change": return {"score": extra_info["list"].pop(), "left": len(extra_info["list"])}
    return os.getpid() if word == "tenth" else float(len(solution_str))
"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "behaviours.py"
    path.write_text(BEHAVIOURS)
    return resolve_reward(CustomRewardConfig(path=str(path)))


def warm(pool):
    """Until the pool knows that the function is quick, and hands out long chunks."""
    for _ in range(20):
        pool.submit_many([(("warm", i), RewardItem("", "warm", "")) for i in range(20)])
        pool.wait_all()
        if pool._crew._task_s is not None and pool._crew._task_s < 0.0005:
            break
    assert pool._crew._chunk_size(1, 20) == 20


def submit(pool, texts, truth=""):
    pool.submit_many([(key, RewardItem("", text, truth)) for key, text in enumerate(texts)])


SAID = {
    "hang": "took longer than 0.5 s",
    "raise": "ValueError: bad answer",
    "exit": "the worker process ended (exit code 5)",
    "segfault": "the worker process ended (killed by SIGSEGV)",
    "close": "the worker process ended (",
}


@pytest.mark.parametrize("word", SAID)
def test_the_seventh_task_of_a_chunk_fails_alone_and_nothing_is_scored_twice(spec, tmp_path, word):
    texts = [f"{i}" for i in range(6)] + [f"6 {word}"] + [f"{i}" for i in range(7, 20)]
    with RewardPool(spec, num_workers=1, timeout_s=0.5 if word == "hang" else 20.0, failure_score=-1.0) as pool:
        warm(pool)
        start = time.monotonic()
        submit(pool, texts, str(tmp_path / "calls"))
        results = pool.wait_all()
        seconds = time.monotonic() - start
    assert [key for key in range(20) if results[key].error] == [6]
    assert SAID[word] in results[6].error and results[6].score == -1.0
    assert [results[key].score for key in range(20) if key != 6] == [float(len(t)) for t in texts if " " not in t]
    assert (tmp_path / "calls").read_text().split("\n")[:-1] == texts
    if word == "hang":
        assert seconds >= 0.5


def test_results_arrive_while_a_later_task_of_their_chunk_is_slow(spec):
    with RewardPool(spec, num_workers=1, timeout_s=60) as pool:
        warm(pool)
        submit(pool, ["a", "bb", "ccc", "d hang", "eeee"])
        early, end = {}, time.monotonic() + 20
        while len(early) < 3 and time.monotonic() < end:
            early |= dict(pool.poll())
            time.sleep(0.005)
        assert {key: result.score for key, result in early.items()} == {0: 1.0, 1: 2.0, 2: 3.0}


def test_a_chunk_that_turns_out_slow_is_given_back_and_spread(spec):
    with RewardPool(spec, num_workers=2) as pool:
        warm(pool)
        until(lambda: all(worker.ready for worker in pool._crew._workers), "for both workers")
        submit(pool, [f"{i} tenth" for i in range(10)])
        done = Counter(result.score for result in pool.wait_all().values())
    assert len(done) == 2 and min(done.values()) >= 3


def test_results_of_many_do_not_depend_on_the_number_of_workers_or_on_bursts(spec):
    words = ["a", "b", "raise", "c"] * 75
    words[33] = words[34] = words[280] = "exit"
    texts = [f"{'x' * (i % 23)} {word}" for i, word in enumerate(words)]
    seen = []
    for workers, burst in ((1, 300), (3, 300), (3, 7)):
        with RewardPool(spec, num_workers=workers) as pool:
            for first in range(0, len(texts), burst):
                some = enumerate(texts[first : first + burst], first)
                pool.submit_many([(key, RewardItem("", text, "")) for key, text in some])
            results = pool.wait_all()
        seen.append([results[key] for key in range(len(texts))])
    assert seen[0] == seen[1] == seen[2]
    assert sum(result.error is not None for result in seen[0]) == 75 + 2


def test_a_child_that_a_function_forked_and_let_return_does_not_answer(spec):
    with RewardPool(spec, num_workers=1) as pool:
        warm(pool)
        submit(pool, ["a", "b fork", "cc", "d fork", "eee"])
        results = pool.wait_all()
    assert [results[key].score for key in range(5)] == [1.0, 6.0, 2.0, 6.0, 3.0]


def test_a_function_that_changes_what_responses_share_changes_its_own_copy(spec):
    shared = {"list": [1.0, 2.0, 3.0]}
    with RewardPool(spec, num_workers=1) as pool:
        pool.submit_many([(key, RewardItem("", "change", "", shared)) for key in range(6)])
        results = pool.wait_all()
    assert {(result.score, result.parts["left"]) for result in results.values()} == {(3.0, 2.0)}
    assert shared == {"list": [1.0, 2.0, 3.0]}


def test_many_are_taken_all_or_none(spec):
    with RewardPool(spec, num_workers=1) as pool:
        for keys in ([1, 2, 1], [0, 5]):
            if keys[0] == 0:
                pool.submit(5, RewardItem("", "five", ""))
            with pytest.raises(ValueError, match=f"key {keys[-1]} is already"):
                pool.submit_many([(key, RewardItem("", "x", "")) for key in keys])
        pool.submit_many([])
        assert list(pool.wait_all()) == [5]


def draws(response, ground_truth):
    import random

    import numpy

    return {"score": random.random(), "numpy": numpy.random.rand()}


def test_generators_that_a_function_imports_as_it_scores_are_seeded_by_the_sample_too():
    spec = resolve_reward(CustomRewardConfig(), function=draws)
    with RewardPool(spec, num_workers=2) as pool:
        submit(pool, ["same"] * 8)
        results = pool.wait_all().values()
    assert len({(result.score, result.parts["numpy"]) for result in results}) == 1


def test_messages_of_any_size_arrive_whole_and_the_end_is_seen():
    ours, theirs = socket.socketpair()
    here, there = Channel(ours, send_s=1.0), Channel(theirs)
    assert here.receive() == [] and not here.ended
    sizes = [0, 1, (1 << 18) - 8, 1 << 18, 3_000_000]
    pid = os.fork()
    if pid == 0:
        for size in sizes:
            there.send(b"x" * size)
        os._exit(0)
    there.close()
    got = []
    until(lambda: got.extend(here.receive()) or here.ended, "for the end of the channel")
    os.waitpid(pid, 0)
    assert [len(message) for message in got] == sizes


def test_a_worker_that_does_not_read_is_not_waited_for_for_ever():
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(OSError):
        Channel(ours, send_s=0.1).send(b"x" * 10_000_000)
