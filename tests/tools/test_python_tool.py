"""The tool `python`: programs in the sandbox and nowhere else."""

from __future__ import annotations

import asyncio
import errno

import pytest

from posttrain.config.rollout import SandboxConfig
from posttrain.conversations.tools.base import ToolCall
from posttrain.conversations.tools.python import PythonTool, said
from posttrain.conversations.tools.registry import make_tools
from posttrain.conversations.tools.runner import ToolRunner
from posttrain.errors import UserError
from posttrain.sandbox import Result
from posttrain.sandbox.sandbox import isolation_error

CONFIG = SandboxConfig()


@pytest.mark.parametrize(
    ("result", "text", "error"),
    [
        (Result("ok", 0, "4\n\n"), "4", None),
        (Result("ok", 0, " \n"), "(The program printed nothing. Use print() to see results.)", None),
        (
            Result("error", 1, "4\n", "Traceback\n  File x\nValueError: no\n"),
            "4\nValueError: no",
            "error: ValueError: no",
        ),
        (Result("error", 3), "The program ended with exit code 3.", "error: "),
        (Result("timeout", None, "4"), "4\nThe program took too long (5 seconds) and was ended.", "timeout: "),
        (Result("memory"), "The program used too much memory (512 MB) and was ended.", "memory: "),
    ],
)
def test_the_model_is_shown_the_output_and_the_last_line_of_the_error(result, text, error):
    answer = said(result, CONFIG)
    assert (
        answer.text == text
        and (answer.error or "").startswith(error or "")
        and (answer.error is None) == (error is None)
    )


def test_where_no_sandbox_can_be_had_it_is_refused_when_it_is_made(monkeypatch):
    def refuse(self):
        raise isolation_error("user namespace", errno.EPERM)

    monkeypatch.setattr("posttrain.sandbox.sandbox.Sandbox.start", refuse)
    with pytest.raises(UserError, match="in the sandbox and nowhere else") as caught:
        make_tools(["python"], {})
    assert "Operation not permitted" in str(caught.value) and "to do:" in str(caught.value)
    assert "unsafe" not in str(caught.value), "there is no way around it"


@pytest.mark.parametrize("settings", [{"mode": "unsafe"}, {"timeout_s": 0}, {"memory_mb": 1}, {"timeout_s": "long"}])
def test_settings_are_the_limits_alone_and_make_sense(settings):
    with pytest.raises(UserError, match=r"the tool python|tool_config.python"):
        make_tools(["python"], {"python": settings})


def test_programs_run_isolated_one_after_another_and_again_after_a_shutdown():
    tools = make_tools(["python"], {"python": {"timeout_s": 20, "memory_mb": "256"}})
    programs = ["x = 6\nprint(x * 7)", "print(x)", "import socket; socket.create_connection(('127.0.0.1', 80))"]
    with ToolRunner(tools, timeout_s=60, max_chars=1000, side="left") as runner:
        (first, second, third) = runner.answer("c", [ToolCall("python", {"code": code}) for code in programs]).result()
        assert first.text == "42" and first.error is None
        assert second.text == "NameError: name 'x' is not defined" and second.error == f"said: error: {second.text}"
        assert "Error" in third.text and "Traceback" not in third.text
        assert runner.counts.by_tool["python"] == {"calls": 3, "said": 2}
    tool = tools["python"]
    assert isinstance(tool, PythonTool) and tool._sandbox is None
    assert asyncio.run(tool.call("c", {"code": "print(1)"})).text == "1"
    tool.shutdown()
