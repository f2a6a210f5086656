"""RewardPool: what hangs, raises, exits, prints or returns nonsense is recorded; results are the same for any pool."""

import os
import pickle
import signal
import struct
import subprocess
import sys
import time
from contextlib import suppress
from textwrap import dedent

import pytest
from patience import alive, gone, until

from posttrain.config.rollout import CustomRewardConfig
from posttrain.rewards import RewardError, RewardItem, RewardPool, RewardSpec, crew, resolve_reward
from posttrain.rewards.pool import PrintLimiter


def _frame(message):
    """A message as machines/channel.py writes it."""
    data = pickle.dumps(message)
    return struct.pack("!Q", len(data)) + data


BEHAVIOURS = """
import ctypes, os, random, subprocess, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "hang": time.sleep(60)
    if solution_str == "spin":
        while True: print("again")
    if solution_str == "raise": raise ValueError("bad answer")
    if solution_str == "sys.exit": sys.exit(4)
    if solution_str == "os._exit": os._exit(5)
    if solution_str == "segfault": ctypes.string_at(0)
    if solution_str == "random": return random.random()
    if solution_str == "set": return hash("word") % 1000
    if solution_str == "child":
        open(ground_truth, "w").write(str(subprocess.Popen(["sleep", "60"]).pid))
        time.sleep(60)
    if solution_str == "killed" and not os.path.exists(ground_truth):
        if ground_truth: open(ground_truth, "w").close()
        os.kill(os.getpid(), 9)
    if solution_str == "eval": return eval(ground_truth)
    if solution_str == "print":
        print("one"); print("two", end="")
    if solution_str == "flood":
        for i in range(10**5): print("line", i)
    return float(len(solution_str))
"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "behaviours.py"
    path.write_text(BEHAVIOURS)
    return resolve_reward(CustomRewardConfig(path=str(path)))


def run(spec, texts, **options):
    with RewardPool(spec, **{"num_workers": 1, "timeout_s": 5.0, **options}) as pool:
        for key, text in enumerate(texts):
            solution, _, truth = text.partition("|")
            pool.submit(key, RewardItem("", solution, truth))
        results = pool.wait_all()
    return [results[key] for key in range(len(texts))]


def test_hanging_reward_gets_the_failure_score_at_its_deadline_and_only_it(spec):
    start = time.monotonic()
    results = run(
        spec, ["a", "bb", "hang", "ccc", "spin", "dddd"], timeout_s=0.5, failure_score=-1.0, on_print=lambda _: 0
    )
    assert [r.score for r in results] == [1.0, 2.0, -1.0, 3.0, -1.0, 4.0]
    assert [r.error for r in results] == [None, None, "took longer than 0.5 s", None, "took longer than 0.5 s", None]
    assert time.monotonic() - start >= 1.0


def sometimes_slow(response, ground_truth):
    import time

    time.sleep(0.15 if response == "slow" else 0.0)
    return 1.0


def test_each_answer_moves_the_deadline_so_that_a_long_chunk_is_no_timeout():
    spec = resolve_reward(CustomRewardConfig(), function=sometimes_slow)
    with RewardPool(spec, num_workers=1, timeout_s=0.8) as pool:
        pool.submit("fast", RewardItem("", "fast", ""))  # a fast function is given long chunks
        pool.wait_all()
        pool.submit_many([(key, RewardItem("", "slow", "")) for key in range(10)])
        assert [result.error for result in pool.wait_all().values()] == [None] * 10


def test_children_of_a_hanging_reward_are_ended_with_it(spec, tmp_path):
    (result,) = run(spec, [f"child|{tmp_path}/pid"], timeout_s=1.0)
    assert result.error == "took longer than 1 s"
    assert gone(int((tmp_path / "pid").read_text()))


FAILURES = [
    ("raise", "ValueError: bad answer"),
    ("sys.exit", "exit(4)"),
    ("os._exit", "exit code 5"),
    ("segfault", "SIGSEGV"),
    ("eval|float('nan')", "nan"),
    ("eval|float('inf')", "inf"),
    ("eval|None", "returned None instead of a number: every path through it must return a score"),
    ("eval|'1.0'", "str"),
    ("eval|[1.0]", "list"),
    ("eval|{'value': 1}", "without 'score'"),
    ("eval|{'score': None}", "returned None"),
    ("eval|{'score': float('nan')}", "nan"),
    ("eval|10**400", "scores end at"),
]


def test_what_is_no_finite_number_is_a_recorded_failure_and_the_next_sample_is_scored(spec):
    results = run(spec, [text for failing, _ in FAILURES for text in (failing, "after")], failure_score=-2.0)
    for (text, said), bad, after in zip(FAILURES, results[::2], results[1::2], strict=True):
        assert bad.score == -2.0 and said in bad.error and bad.parts == {}, text
        assert (after.score, after.error) == (5.0, None), text


def test_raised_error_names_file_and_line(spec):
    (result,) = run(spec, ["raise"])
    assert f"{spec.path}, line 8, in compute_score" in result.error


def test_any_finite_number_is_a_score(spec):
    texts = ["eval|-0.5", "eval|7", "eval|True", "eval|__import__('fractions').Fraction(1, 4)"]
    assert [r.score for r in run(spec, texts)] == [-0.5, 7.0, 1.0, 0.25]


def test_dict_results_keep_numbers_and_strings_as_named_parts(spec):
    (result,) = run(spec, ["eval|{'score': 0.5, 'format': 1, 'ok': True, 'pred': '42', 'none': None, 'list': [1]}"])
    assert result.score == 0.5
    assert result.parts == {"format": 1.0, "ok": 1.0, "pred": "42", "none": "", "list": "[1]"}


def test_prints_reach_the_caller_line_by_line_and_are_cut(spec):
    lines = []
    results = run(spec, ["print", "flood"], on_print=lines.append)
    assert [r.error for r in results] == [None, None]
    assert lines[:3] == ["one", "two", "line 0"]
    assert lines[-1] == "... cut" and len(lines) == 2 + 20 + 1


def test_of_a_line_that_is_too_long_its_beginning_is_shown(spec):
    lines = []
    texts = ["eval|print('x' * 3_000_000) or 1", "eval|print('short', 'y' * 1990, sep='\\n') or 1"]
    run(spec, texts, on_print=lines.append)
    assert lines == ["x" * 2000 + "... cut", "short", "y" * 1990]


def test_rewards_that_print_in_every_call_do_not_bury_the_console():
    shown, now = [], 0.0
    prints = PrintLimiter(shown.append, clock=lambda: now)
    for number in range(100_000):
        prints(f"response {number}")
    assert len(shown) == 41 and shown[39] == "response 39" and "`posttrain reward try` shows all" in shown[40]
    now = 10.0
    prints("later")
    assert shown[41:] == ["later"]


def test_results_do_not_depend_on_the_number_of_workers(spec):
    texts = ["a" * (i % 17) for i in range(300)] + [
        "random",
        "set",
        "raise",
        "os._exit",
        "eval|{'score': 1, 'p': 2}",
    ] * 3
    one, three = run(spec, texts), run(spec, texts, num_workers=3)
    assert one == three
    assert len({r.score for r in one[300::5]}) == 1  # `random` is seeded by the sample


def test_built_in_scores_run_in_workers_and_name_unknown_sources():
    with RewardPool(RewardSpec(), num_workers=1) as pool:
        pool.submit("right", RewardItem("gsm8k", "#### 42", "42"))
        pool.submit("hard", RewardItem("math", "\\boxed{2\\sqrt{3}}", "\\sqrt{12}"))
        pool.submit("unknown", RewardItem("mystery", "42", "42"))
        results = pool.wait_all()
    assert (results["right"].score, results["right"].parts) == (1.0, {"pred": "42"})
    assert results["hard"].score == 1.0
    assert "no built-in scorer for data source 'mystery'" in results["unknown"].error


def grouped(completions, ground_truths):
    if completions[0] == "short":
        return [1.0]
    if completions[0] == "mixed":
        return [1.0, None, {"score": 3.0, "rank": 1}]
    return [float(len(completions)) + i / 10 for i in range(len(completions))]


def test_groups_are_scored_in_one_call_whatever_the_order_of_submission():
    spec = resolve_reward(CustomRewardConfig(), function=grouped)
    keys = [(uid, i) for uid in ("u", "v") for i in range(3)]
    seen = []
    for order in (keys, keys[::-1], keys[::2] + keys[1::2]):
        with RewardPool(spec, num_workers=2) as pool:
            for uid, i in order:
                pool.submit((uid, i), RewardItem("", "text", "", group=uid, group_size=3))
            results = pool.wait_all()
        seen.append([results[key].score for key in keys])
    assert seen == [[3.0, 3.1, 3.2, 3.0, 3.1, 3.2]] * 3


def test_the_lane_of_a_timeline_is_busy_while_workers_score_and_not_while_a_group_is_incomplete():
    with RewardPool(resolve_reward(CustomRewardConfig(), function=grouped), num_workers=1) as pool:
        pool.submit(("u", 0), RewardItem("", "text", "", group="u", group_size=2))
        time.sleep(0.05)
        assert pool.lane.take() == []
        pool.submit(("u", 1), RewardItem("", "text", "", group="u", group_size=2))
        pool.wait_all()
        ((stage, _, seconds, name),) = pool.lane.take()
        assert (stage, name) == ("reward", "rewards") and seconds > 0
        time.sleep(0.01)
        assert pool.lane.take() == []


def test_list_of_wrong_length_fails_the_group_and_a_bad_entry_fails_alone():
    spec = resolve_reward(CustomRewardConfig(), function=grouped)
    with RewardPool(spec, num_workers=1, failure_score=-9.0) as pool:
        for name in ("short", "mixed"):
            for i in range(3):
                pool.submit((name, i), RewardItem("", name, "", group=name, group_size=3))
        pool.submit(("rest", 0), RewardItem("", "rest", "", group="rest", group_size=3))
        results = pool.wait_all()
    assert [results["short", i].score for i in range(3)] == [-9.0] * 3
    assert results["short", 0].error == "returned 1 scores for 3 responses"
    assert [results["mixed", i].score for i in range(3)] == [1.0, -9.0, 3.0]
    assert results["mixed", 2].parts == {"rank": 1.0}
    assert results["rest", 0].score == 1.0  # an incomplete group is scored as it is when nothing more can come


def test_poll_returns_each_result_once_while_more_is_submitted(spec):
    seen = {}
    with RewardPool(spec, num_workers=2) as pool:
        for key in range(200):
            pool.submit(key, RewardItem("", "x" * key, ""))
            for done, result in pool.poll():
                assert done not in seen
                seen[done] = result.score
        with pytest.raises(ValueError, match="already"):
            pool.submit("twice", RewardItem("", "", ""))
            pool.submit("twice", RewardItem("", "", ""))
        seen.update((key, result.score) for key, result in pool.wait_all().items() if key != "twice")
        assert pool.wait_all() == {} and pool.poll() == []
    assert seen == {key: float(key) for key in range(200)}


def test_a_reward_that_no_longer_imports_ends_in_a_clear_error_not_in_restarts(tmp_path):
    path = tmp_path / "later_broken.py"
    path.write_text("def compute_score(response, ground_truth): return 1.0")
    spec = resolve_reward(CustomRewardConfig(path=str(path)))
    path.write_text("import no_such_package")
    with RewardPool(spec, num_workers=2) as pool, pytest.raises(RewardError, match="no_such_package"):
        pool.submit(0, RewardItem("", "", ""))
        pool.wait_all()


def test_the_worker_that_looked_at_a_reward_is_the_first_of_a_pool(tmp_path):
    path = tmp_path / "noted.py"
    path.write_text(
        f"import os\nopen({str(tmp_path / 'imports')!r}, 'a').write(f'{{os.getpid()}} ')\n"
        "def compute_score(response, ground_truth): return float(len(response))"
    )
    kept: list[crew.WorkerProcess] = []
    spec = resolve_reward(CustomRewardConfig(path=str(path)), spec_fields={"timeout_s": 5.0}, kept=kept)
    assert spec.timeout_s == 5.0
    looked = kept[0].process.pid
    with RewardPool(spec, num_workers=1, timeout_s=5.0, first=kept.pop()) as pool:
        assert [result.score for result in _scores(pool, ["a", "bb", "ccc"])] == [1.0, 2.0, 3.0]
    assert gone(looked) and (tmp_path / "imports").read_text() == f"{looked} "
    path.write_text("import no_such_package")
    with pytest.raises(RewardError, match="no_such_package"):
        resolve_reward(CustomRewardConfig(path=str(path)), kept=kept)
    assert kept == []


def test_idle_workers_that_are_killed_are_replaced_however_many(spec, monkeypatch):
    """As by the kernel when memory runs short during an update: not one by one, for it to kill again, but for work."""
    started, plain = [], crew.WorkerProcess
    monkeypatch.setattr(crew, "WorkerProcess", lambda spec: started.append(plain(spec)) or started[-1])
    with RewardPool(spec, num_workers=4) as pool:
        for times in (1, 2):
            pool.submit("x", RewardItem("", "four", ""))
            assert pool.wait_all()["x"].score == 4.0
            workers = list(pool._crew._workers)
            until(lambda crew=workers: all(worker.ready for worker in crew), "for the workers")
            for worker in workers:
                with suppress(ProcessLookupError):
                    os.kill(worker.handle.process.pid, signal.SIGKILL)
            assert all(gone(worker.handle.process.pid) for worker in workers)
            until(
                lambda crew=workers: not any(worker in pool._crew._workers for worker in crew), "for the pool to see it"
            )
            time.sleep(0.2)  # in which others could be started
            assert len(started) == 4 * times
        assert [result.score for result in _scores(pool, ["a", "bb", "ccc"])] == [1.0, 2.0, 3.0]


def test_what_a_killed_worker_had_before_it_is_tried_again_once(spec, tmp_path):
    """Nobody knows whether it had begun; what kills every worker is found out with the second."""
    once, always, after = run(spec, [f"killed|{tmp_path / 'seen'}", "killed|", "four"])
    assert (once.score, once.error) == (6.0, None)
    assert "SIGKILL" in always.error and (after.score, after.error) == (4.0, None)


def _scores(pool, texts):
    pool.submit_many([(key, RewardItem("", text, "")) for key, text in enumerate(texts)])
    return [result for _, result in sorted(pool.wait_all().items())]


NONSENSE = {
    "huge length": b"\xff" * 64,
    "no pickle": b"\0\0\0\0\0\0\0\x04junk",
    "no message": _frame(5),
    "unknown kind": _frame(("hello", 1)),
    "another task's answer": _frame(("done", 10**6, [(1.0, {}, None)], 0.0, 0.0)),
    "too many answers": _frame(("done", 0, [(1.0, {}, None)] * 2, 0.0, 0.0)),
    "wrong type": _frame(("wait", "long")),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_a_worker_that_sends_nonsense_is_replaced_and_its_task_alone_fails(spec, kind):
    write = f"eval|__import__('os').write(int(__import__('sys').argv[1]), {NONSENSE[kind]!r})"
    broken, fine = run(spec, [write, "four"])
    assert "could not be read" in (broken.error or "") and (fine.score, fine.error) == (4.0, None)


def test_wrong_limits_are_refused():
    for options in ({"num_workers": 0}, {"timeout_s": 0.0}):
        with pytest.raises(RewardError, match=r"reward\."):
            RewardPool(RewardSpec(), **options)


def test_closing_ends_the_workers_even_in_the_middle_of_a_score(spec):
    pool = RewardPool(spec, num_workers=2)
    pool.submit("pid", RewardItem("", "eval", "__import__('os').getpid()"))
    pid = int(pool.wait_all()["pid"].score)
    pool.submit(1, RewardItem("", "hang", ""))
    pool.submit(2, RewardItem("", "hang", ""))
    time.sleep(0.1)
    pool.close()
    pool.close()
    assert gone(pid)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(3, RewardItem("", "", ""))


def test_workers_do_not_outlive_a_run_that_is_killed(tmp_path):
    script = tmp_path / "victim.py"
    script.write_text(
        dedent("""
        import time
        from posttrain.config.rollout import CustomRewardConfig
        from posttrain.rewards import RewardItem, RewardPool, resolve_reward
        def reward(response, ground_truth):
            if response == "hang": time.sleep(60)
            import os
            return os.getpid()
        pool = RewardPool(resolve_reward(CustomRewardConfig(), function=reward), num_workers=1)
        pool.submit(0, RewardItem("", "", ""))
        print(int(pool.wait_all()[0].score), flush=True)
        pool.submit(1, RewardItem("", "hang", ""))
        time.sleep(60)
        """)
    )
    victim = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    worker = int(victim.stdout.readline())
    time.sleep(0.2)
    assert alive(worker)
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    assert gone(worker)


def test_thousands_of_trivial_responses_take_little_of_the_processor(spec):
    with RewardPool(spec, num_workers=2) as pool:
        pool.submit("warm", RewardItem("", "", ""))
        pool.wait_all()
        start = time.process_time()
        for key in range(4000):
            pool.submit(key, RewardItem("", "some response " * 20, "42", {"index": key}))
        assert len(pool.wait_all()) == 4000
        seconds = time.process_time() - start
    assert seconds < 8  # some tenths on an idle machine
