"""`posttrain tool try`, and the page that lets its reader type it."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from posttrain import cli
from posttrain.conversations.tools.base import ToolCall
from posttrain.conversations.tools.registry import TOOLS, make_tools
from posttrain.conversations.tools.runner import ToolRunner
from posttrain.conversations.tools.try_command import main
from posttrain.errors import UserError
from tests.tools.call_templates import tokenizer_of

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "own_tool.md").read_text()
BASH = "\n".join(re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the page's two files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_tools.py").write_text(re.findall(r"<<'PY'\n(.*?)^PY$", BASH, re.M | re.S)[0])
    (tmp_path / "guess.py").write_text(re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)[0])
    return tmp_path


def test_the_commands_of_the_page_answer(folder, capsys):
    commands = [shlex.split(line) for line in BASH.splitlines() if line.startswith("posttrain ")]
    shown = []
    for command in commands:
        assert cli.main(command[1:]) == 0
        shown.append(capsys.readouterr().out)
    weather, calculator, search = shown
    assert "<tool_response>\n71.0 F\n</tool_response>" in weather and '"description": "Its English name"' in weather
    assert '{"name": "weather", "arguments": {"city": "Rome", "unit": "F"}}' in weather and "digits" not in weather
    assert "<tool_response>\n5\n</tool_response>" in calculator and re.search(r"\n[\d.e-]+ s\n", calculator)
    assert "1874 metres" in search and "[2]" not in search and "a local index over 40 passages" in search


def test_the_errors_of_the_page_are_what_a_model_reads(folder):
    tools = make_tools(["my_tools.py:weather"], {})
    calls = [{"city": "Bonn"}, {"city": "Rome", "unit": "K"}]
    with ToolRunner(tools, timeout_s=20, max_chars=999, side="left") as runner:
        answers = runner.answer("c", [*(ToolCall("weather", call) for call in calls), ToolCall("wether", {})]).result()
    assert [f"| `{answer.text}`" in PAGE for answer in answers] == [True] * 3, answers


def test_the_class_of_the_page_keeps_a_state(folder, capsys):
    assert main(["guess.py", '{"number": 9}', "--given", '{"secret": 9}', "bonus=0.5"]) == 0
    shown = capsys.readouterr().out
    assert "Right." in shown and "reward 0.5" in shown and "metrics: {'right': 1.0}" in shown


def test_the_page_names_every_tool_that_is_built_in():
    assert [name for name in TOOLS if f"| `{name}` |" not in PAGE] == []


def test_an_error_has_the_status_1_and_no_arguments_show_the_schema_alone(capsys):
    assert main(["calculator", "1/0"]) == 1
    assert capsys.readouterr().out.endswith("error: said: This cannot be computed: division by zero.\n")
    assert main(["calculator"]) == 0
    assert "<tools>" in (shown := capsys.readouterr().out) and "<tool_call>" not in shown


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["calculater"], "there is no tool 'calculater'"),
        (["calc"], "there is no tool 'calc'. Did you mean calculator?"),
        (["calculator", "{x}"], "ARGUMENTS `{x}` is no JSON"),
        (["calculator", "{x}"], "names and texts in double quotes"),
        (["search", "x", "y", "corpus=embedded"], "one too many"),
        (["calculator", "1", "--given", "[]"], "--given must be a JSON object"),
        (["calculator", "1", "digits=3"], "no setting 'digits'"),
        (["calculator", "1", "--timeout_s", "0"], "--timeout_s is above 0"),
        (["old", "1", "--config", "gone.yaml"], "gone.yaml cannot be read"),
    ],
)
def test_what_cannot_be_tried_is_said_in_words(args, why):
    with pytest.raises(UserError, match=re.escape(why)):
        main(args)


def test_limits_of_a_run_hold_for_a_try(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("slow.py").write_text(
        "import time\ndef slow(seconds: float) -> str:\n    '''Sleeps.'''\n    time.sleep(seconds)\n"
        "    return 'ab' * 50\n"
    )
    for side, kept in (("left", "abab"), ("right", "abab")):
        assert main(["slow.py", "0", "--max_chars", "5", "--side", side]) == 0
        shown = capsys.readouterr().out.partition("<tool_response>")[2]
        assert "[95 characters left out]" in shown and kept in shown
        assert shown.strip().startswith("[") == (side == "right")
    assert main(["slow.py", "20", "--timeout_s", "0.2"]) == 1
    assert "gave no answer within 0.2 seconds" in capsys.readouterr().out


def test_a_call_is_shown_as_the_template_of_the_model_writes_it(tmp_path, capsys):
    tokenizer_of("GLM 4.5").save_pretrained(tmp_path)
    assert main(["calculator", "2+3", "--model", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>2+3</arg_value>" in shown
    assert '"arguments"' not in shown and "<|observation|>" in shown


@pytest.mark.parametrize("embedded", [False, True])
def test_a_models_own_template_shows_the_conversation(tiny_model, capsys, embedded):
    assert main(["calculator", "2+3", "--model", "embedded" if embedded else str(tiny_model)]) == 0
    shown = capsys.readouterr().out
    assert "by the chat template of" in shown and "<|assistant|>" in shown and "5" in shown
