"""The runner: calls side by side, every call an answer, whatever a tool does."""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from posttrain.conversations.tools.base import Tool, ToolAnswer, ToolCall, ToolFault
from posttrain.conversations.tools.registry import FunctionTool
from posttrain.conversations.tools.runner import ToolRunner
from posttrain.conversations.tools.threads import Threads

FOREVER = threading.Event()


def echo(text: str, wait: float = 0.0) -> str:
    """Says the text again."""
    time.sleep(wait)
    return text


async def echo_async(text: str, wait: float = 0.0) -> str:
    """Says the text again."""
    await asyncio.sleep(wait)
    return text


def hang() -> str:
    """Never answers."""
    FOREVER.wait()
    return "at last"


async def hang_async() -> str:
    """Never answers, and does not let itself be cancelled."""
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


async def block(yes: bool = True) -> str:
    """Blocks the event loop that it runs in."""
    if yes:
        FOREVER.wait()
    return "free"


def fail(kind: str) -> str:
    """Fails."""
    if kind == "exit":
        sys.exit(3)
    if kind == "fault":
        raise ToolFault("Nobody knows.")
    if kind == "stop":
        raise StopIteration
    if kind == "timeout":
        raise TimeoutError
    raise FileNotFoundError("no file /home/me/secret/data.txt here\nTraceback: ...")


@pytest.fixture(params=[True, False], ids=["processes", "threads"])
def runner_of(request):
    """Runners whose tools run in worker processes, and in threads as the built-in ones do."""
    made: list[ToolRunner] = []

    def make(*sources, timeout_s: float = 20.0, max_chars: int = 1000, side: str = "middle") -> ToolRunner:
        tools = [source if isinstance(source, Tool) else FunctionTool(source) for source in sources]
        for tool in tools:
            tool.isolated = request.param
        made.append(ToolRunner({t.name: t for t in tools}, timeout_s=timeout_s, max_chars=max_chars, side=side))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


def ask(runner: ToolRunner, name: str, **arguments) -> ToolAnswer:
    (answer,) = runner.answer("c", [ToolCall(name, arguments)]).result()
    return answer


def test_answers_come_in_the_order_of_calls_and_turns_do_not_wait_for_each_other(runner_of):
    runner = runner_of(echo, echo_async)
    slow = runner.answer("slow", [ToolCall("echo", {"text": "a", "wait": 0.2}), ToolCall("echo_async", {"text": "b"})])
    quick = runner.answer("quick", [ToolCall("echo_async", {"text": "c"})])
    assert [answer.text for answer in quick.result()] == ["c"] and not slow.done()
    assert [answer.text for answer in slow.result()] == ["a", "b"]
    assert runner.answer(("any", 3), []).result() == []


def test_calls_of_a_turn_and_of_several_turns_run_side_by_side(runner_of):
    barrier = multiprocessing.get_context("fork").Barrier(6, timeout=20)

    def meet() -> str:
        """Answers when six are here."""
        barrier.wait()
        return "met"

    runner = runner_of(meet)
    turns = [runner.answer(conversation, [ToolCall("meet", {})] * 3) for conversation in range(2)]
    assert [answer.text for turn in turns for answer in turn.result()] == ["met"] * 6


def test_no_more_calls_run_at_once_than_a_tool_allows(runner_of):
    shared = multiprocessing.get_context("fork").Array("i", [0, 0])

    def count() -> str:
        """Counts who is here."""
        with shared.get_lock():
            shared[0] += 1
            shared[1] = max(shared[1], shared[0])
        time.sleep(0.01)
        with shared.get_lock():
            shared[0] -= 1
        return "ok"

    tool = FunctionTool(count)
    tool.at_once = 2
    runner = runner_of(tool)
    answers = runner.answer("c", [ToolCall("count", {})] * 12).result()
    assert len(answers) == 12 and shared[1] == 2


def test_what_hangs_is_answered_after_its_deadline_and_holds_up_neither_other_calls_nor_the_end(runner_of):
    runner = runner_of(hang, hang_async, block, echo, timeout_s=0.2)
    names = ("hang", "hang_async", "block")
    answers = runner.answer("c", [ToolCall(name, {}) for name in names]).result()
    assert [a.text for a in answers] == [f"The tool {n} gave no answer within 0.2 seconds." for n in names]
    assert all(a.error and a.error.startswith("timeout: ") and a.seconds > 0 for a in answers)
    assert ask(runner, "echo", text="on").text == "on"
    assert ask(runner, "block", yes=False).text == "free", "the tool goes on in a fresh loop"
    runner.close()  # waits for none of them


def test_calls_that_never_began_because_another_blocked_their_loop_are_begun_again(runner_of):
    runner = runner_of(block, timeout_s=0.3)
    answers = runner.answer(
        "c", [ToolCall("block", {}), ToolCall("block", {"yes": False}), ToolCall("block", {"yes": False})]
    ).result()
    assert [answer.text for answer in answers[1:]] == ["free", "free"]
    assert (answers[0].error or "").startswith("timeout: ")
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.answer("c", [])


def test_a_decorator_may_hide_that_a_function_is_async(runner_of):
    @functools.wraps(echo_async)
    def hidden(*args, **kwargs):
        return echo_async(*args, **kwargs)

    assert ask(runner_of(hidden), "echo_async", text="x").text == "x"


def test_a_tool_of_which_too_many_calls_hang_is_not_tried_again_until_they_end(monkeypatch):
    monkeypatch.setattr("posttrain.conversations.tools.threads.MOST_HUNG", 2)
    threads, free = Threads(), threading.Event()

    async def give_up() -> None:
        task = asyncio.create_task(threads.run(free.wait))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def story() -> str:
        await give_up()
        await give_up()
        with pytest.raises(ToolFault, match="2 earlier calls of it hang"):
            await threads.run(lambda: "x")
        free.set()
        for thread in list(threads.hung):
            thread.join()
        return await threads.run(lambda: "x")

    assert asyncio.run(story()) == "x"


@pytest.mark.parametrize(
    ("kind", "text", "error"),
    [
        (
            "file",
            "The tool fail failed: FileNotFoundError: no file (a file) here.",
            "raised: FileNotFoundError: no file",
        ),
        ("exit", "The tool fail failed: RuntimeError: it raised SystemExit.", "raised: "),
        ("stop", "The tool fail failed: RuntimeError: it raised StopIteration.", "raised: "),
        ("timeout", "The tool fail failed: RuntimeError: it waited too long for something.", "raised: "),
        ("fault", "Nobody knows.", "said: Nobody knows."),
    ],
)
def test_an_error_of_a_tool_is_one_sentence_without_paths(runner_of, kind, text, error):
    answer = ask(runner_of(fail), "fail", kind=kind)
    assert answer.text == text and answer.error is not None and answer.error.startswith(error)


def test_unknown_tools_and_arguments_that_do_not_fit_are_told_to_the_model(runner_of):
    runner = runner_of(echo, fail)
    assert ask(runner, "ecco", text="x").text == "There is no tool 'ecco'; there are: echo, fail."
    assert ask(runner, "echo", words="x").text.startswith('echo has no parameter "words"; it takes text (string)')
    assert runner.counts.by_tool == {"(unknown)": {"calls": 1, "unknown": 1}, "echo": {"calls": 1, "arguments": 1}}


def test_counts_tell_which_tool_never_works(runner_of):
    runner = runner_of(echo, fail)
    ask(runner, "echo")
    for kind in ("fault", "file", "file"):
        ask(runner, "fail", kind=kind)
    assert runner.counts.by_tool["fail"] == {"calls": 3, "said": 1, "raised": 2}
    assert [t.partition(";")[0] for t in runner.counts.troubles()] == [
        "all 1 calls of the tool echo failed (1 arguments)",
        "all 3 calls of the tool fail failed (2 raised, 1 said)",
    ]
    ask(runner, "echo", text="x")
    assert len(runner.counts.troubles()) == 1 and runner.counts.failed("echo") == 1


@pytest.mark.parametrize(
    ("side", "text"),
    [
        ("left", "01234... [5 characters left out]"),
        ("right", "[5 characters left out] ...56789"),
        ("middle", "012... [5 characters left out] ...89"),
    ],
)
def test_long_answers_are_cut_where_verl_cuts_them_and_say_how_much_is_left_out(runner_of, side, text):
    runner = runner_of(echo, max_chars=5, side=side)
    assert ask(runner, "echo", text="0123456789").text == text
    assert ask(runner, "echo", text="01234").text == "01234"


def test_what_functions_return_becomes_text(runner_of):
    def give(what: str) -> object:
        """Gives something."""
        return {"list": [1, "é"], "dict": {"a": None}, "none": None, "float": 0.5, "half": "\ud800", "odd": {1j}}[what]

    runner = runner_of(give)
    texts = [ask(runner, "give", what=what).text for what in ("list", "dict", "none", "float", "half", "odd")]
    assert texts == ['[1, "é"]', '{"a": null}', "(no result)", "0.5", "\ufffd", "{1j}"]


class Counter(Tool):
    """Counts in each conversation; its rewards and its ends can fail."""

    name = "counter"
    schema = {"type": "function", "function": {"name": "counter", "description": "Counts.", "parameters": {}}}  # noqa: RUF012

    def __init__(self, log: Path | None = None) -> None:
        self.numbers: dict = {}
        self.log = log

    def note(self, word: str) -> None:
        if self.log is not None:  # a file, because tools run in other processes
            with self.log.open("a") as file:
                file.write(f"{word}\n")

    async def open(self, conversation, **given):
        if given.get("broken"):
            raise ValueError("no counter today")
        self.numbers[conversation] = given.get("start", 0)

    async def call(self, conversation, arguments):
        self.numbers[conversation] += 1
        return ToolAnswer(str(self.numbers[conversation]), reward=0.5, metrics={"count": 1.0})

    async def reward(self, conversation):
        if conversation == "poor":
            raise ValueError("no money for hush-1")
        return float(self.numbers[conversation])

    async def close(self, conversation):
        self.note(conversation)
        if conversation == "poor":
            raise ValueError("no end")
        del self.numbers[conversation]

    def shutdown(self):
        self.note(f"shutdown with {len(self.numbers)} open")


def test_each_conversation_has_its_own_state_its_reward_and_its_end(runner_of, tmp_path):
    counter = Counter(tmp_path / "log")
    runner = runner_of(counter, echo)
    runner.open("c", {"counter": {"start": 5}, "nobody": {}})
    runner.open("other", {})
    assert [ask(runner, "counter").text for _ in range(2)] == ["6", "7"]
    answer = ask(runner, "counter")
    assert (answer.reward, answer.metrics, answer.error) == (0.5, {"count": 1.0}, None) and answer.seconds > 0
    assert runner.reward("c") == 8.0 and runner.reward("other") == 0.0
    runner.close_conversation("c")
    runner.close()
    log = (tmp_path / "log").read_text().splitlines()
    # Each conversation may be in a process of its own, and these do not wait for each other.
    closed = sorted(log[:2]) if counter.isolated else log[:2]
    assert closed == ["c", "other"], "what is left open is closed at the end"
    assert set(log[2:]) == {"shutdown with 0 open"}


def test_secrets_are_taken_out_and_a_tool_whose_secrets_are_none_is_broken_and_hangs_nobody(runner_of):
    tool = FunctionTool(echo)
    runner = runner_of(tool)
    for secrets, text in ((["hush", ""], "*** a lush"), ("hush", "*** a lush"), ((), "hush a lush")):
        tool.secrets = secrets
        assert ask(runner, "echo", text="hush a lush").text == text
    tool.secrets = [5]  # pyright: ignore
    answer = ask(runner, "echo", text="hush")
    assert (answer.text, answer.error) == ("The tool is broken.", "raised: its secrets cannot be taken out: TypeError")
    (answer,) = runner.answer("c", [ToolCall({"name": "echo"}, {})]).result()  # pyright: ignore
    assert answer.error is not None and answer.error.startswith("unknown: There is no tool")


def test_a_conversation_that_is_being_closed_is_waited_for_at_the_end(runner_of, tmp_path):
    class Slow(Counter):
        async def close(self, conversation):
            await asyncio.sleep(0.3)
            self.note(conversation)

    runner = runner_of(Slow(tmp_path / "log"))
    runner.open("ending", {})
    runner.close_conversation("ending")
    runner.close()
    assert (tmp_path / "log").read_text().splitlines()[0] == "ending"


def test_tools_that_fail_or_hang_at_the_end_hold_up_neither_the_others_nor_the_run(runner_of, monkeypatch):
    monkeypatch.setattr("posttrain.conversations.tools.runner._CLOSING_S", 0.2)
    ended = []
    first, second, third = FunctionTool(echo), FunctionTool(echo_async), FunctionTool(hang)
    first.shutdown = lambda: print(FOREVER.wait())
    second.shutdown = lambda: sys.exit("not yet")
    third.shutdown = lambda: ended.append("third")
    runner = runner_of(first, second, third)
    runner.close()
    assert ended == ["third"]
    assert runner.counts.troubles() == [
        "`shutdown` of the tool echo_async failed 1 times; the last: shutdown: SystemExit: not yet"
    ]


def test_a_conversation_whose_tool_cannot_be_opened_is_told_so_and_goes_on(runner_of):
    tool = Counter()
    tool.secrets = ["hush-1"]
    runner = runner_of(tool)
    runner.open("c", {"counter": {"broken": True}})
    answer = ask(runner, "counter")
    assert answer.text == "The tool counter is not available in this conversation."
    assert answer.error == "open: ValueError: no counter today" and runner.reward("c") == 0.0
    runner.open("poor", {})
    assert runner.reward("poor") == 0.0
    runner.close_conversation("poor")
    runner.close()
    assert runner.counts.by_tool["counter"] == {"calls": 1, "open": 1, "reward": 1, "close": 1}
    assert runner.counts.troubles()[-1] == (
        "`reward` of the tool counter failed 1 times; the last: reward: ValueError: no money for ***"
    )


class Broken(Counter):
    """Keeps to no promise."""

    name = "broken"

    async def call(self, conversation, arguments):
        return {"dict": 3, "reward": ToolAnswer("x", reward="much")}[arguments["what"]]


@pytest.mark.parametrize("what", ["dict", "reward"])
def test_a_tool_that_keeps_to_no_promise_cannot_end_the_run(runner_of, what):
    tool = Broken()
    tool.schema = {"function": {"parameters": {"additionalProperties": True}}}
    runner = runner_of(tool)
    assert (ask(runner, "broken", what=what).error or "").startswith("raised: ")
    tool.schema = {}
    assert ask(runner, "broken", what=what).text == "The tool broken is broken."


WRONG = {
    "nan": {"reward": float("nan")},
    "inf": {"reward": float("inf")},
    "text": {"reward": "much"},
    "time": {"seconds": "long"},
    "metrics": {"metrics": {"right": "yes"}},
}


def earns(how: str) -> str:
    """Gives numbers that are none."""
    return ToolAnswer("well", **WRONG[how])  # pyright: ignore


class Earns(Tool):
    """Its conversation earns what is no number."""

    name, isolated = "earner", False
    schema = {"type": "function", "function": {"name": "earner", "description": "", "parameters": {}}}  # noqa: RUF012

    async def call(self, conversation, arguments):
        return "well"

    async def reward(self, conversation):
        return float("nan")


def test_a_number_that_is_none_is_an_error_of_the_call():
    tools = {"earns": FunctionTool(earns), "earner": Earns()}
    with ToolRunner(tools, timeout_s=20, max_chars=99, side="left") as runner:
        runner.open("c", {})
        answers = runner.answer("c", [ToolCall("earns", {"how": how}) for how in WRONG]).result()
        assert [one.text for one in answers] == ["The tool earns is broken."] * 5
        assert {(one.reward, type(one.seconds)) for one in answers} == {(0.0, float)}
        assert "its reward is nan" in (answers[0].error or "")
        assert runner.reward("c") == 0.0
        assert runner.counts.last_error["earner", "reward"] == "reward: ValueError: the reward is nan"
