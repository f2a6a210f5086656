"""Tools by name: built in, registered, of a user's file; and their settings."""

from __future__ import annotations

import subprocess
import sys

import pytest

from posttrain.conversations.tools.base import Tool, ToolCall
from posttrain.conversations.tools.registry import TOOLS, make_tools, register_tool
from posttrain.conversations.tools.runner import ToolRunner
from posttrain.errors import UserError

FILE = '''
from posttrain.conversations.tools.base import Tool
from posttrain.conversations.tools.registry import register_tool

LOADED = []

def weather(city: str, *, api_key: str = "", days: int = 1) -> str:
    """Says what the weather will be."""
    if city == "Nowhere":
        raise ValueError(f"the key {api_key} is refused")
    return f"{city}: sun for {days} days, said {api_key}"

def lookup(key: str, *, table: dict) -> str:
    """Looks a key up in the table of this conversation."""
    return str(table.get(key))

class Dice(Tool):
    name = "dice"

    def __init__(self, sides: int, seed: int = 0) -> None:
        self.schema = {"type": "function", "function": {"name": "dice", "description": "", "parameters": {}}}
        self.sides = sides

    async def call(self, conversation, arguments):
        return str(self.sides)

def _hidden(x: int) -> int:
    return x
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_tools.py"
    path.write_text(FILE)
    yield path
    for name in [name for name, module in sys.modules.items() if getattr(module, "__file__", None) == str(path)]:
        del sys.modules[name]
    sys.path[:] = [one for one in sys.path if one != str(tmp_path)]


def texts(tools: dict[str, Tool], *calls: ToolCall, given=None) -> list[str]:
    with ToolRunner(tools, timeout_s=20, max_chars=1000, side="left") as runner:
        runner.open("c", given or {})
        answers = runner.answer("c", calls).result()
        return [part for answer in answers for part in (answer.text, answer.error) if part is not None]


def test_an_unknown_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(UserError, match=r"there is no tool 'calculater'. Did you mean calculator\?") as caught:
        make_tools(["calculater"], {})
    assert all(name in str(caught.value) for name in TOOLS) and "path/to/file.py:function" in str(caught.value)


def test_a_tool_of_a_file_or_a_module_is_called_by_its_function_name(file, monkeypatch, tmp_path):
    tools = make_tools([f"{file}:weather", f"{file}:Dice"], {"dice": {"sides": "6"}})
    assert list(tools) == ["weather", "dice"]
    assert texts(tools, ToolCall("weather", {"city": "Rome"}), ToolCall("dice", {})) == [
        "Rome: sun for 1 days, said ",
        "6",
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert list(make_tools(["my_tools.weather"], {})) == ["weather"]
    sys.modules.pop("my_tools")


def test_settings_of_a_function_stand_behind_its_star_and_secrets_are_masked_in_all_that_it_says(file):
    tools = make_tools([f"{file}:weather"], {"weather": {"api_key": "hush-1234", "days": "3"}})
    assert "api_key" not in str(tools["weather"].schema) and "hush" not in repr(tools["weather"])
    said = texts(tools, ToolCall("weather", {"city": "Rome"}), ToolCall("weather", {"city": "Nowhere"}))
    assert said[0] == "Rome: sun for 3 days, said ***" and "hush" not in " ".join(said)
    assert said[1] == "The tool weather failed: ValueError: the key *** is refused."


def test_what_a_row_gives_reaches_the_function_and_what_nobody_gives_is_said(file):
    tools = make_tools([f"{file}:lookup"], {})
    call = ToolCall("lookup", {"key": "a"})
    assert texts(tools, call, given={"lookup": {"table": {"a": 1}, "ground_truth": "x"}}) == ["1"]
    text, error = texts(tools, call)
    assert text == "The tool lookup is not available in this conversation." and "needs table" in error


@pytest.mark.parametrize(
    ("names", "settings", "why"),
    [
        (["calculator"], {"calculator": {"digits": 3}}, "the tool calculator has no setting 'digits'.*it has none"),
        (["calculator"], {"calculater": {}}, "calculater is none of the tools: did you mean calculator"),
        ([], {"search": {"url": "x"}}, "search is none of the tools"),
        (["calculator", "calculator"], {}, "two tools are called calculator"),
        (["{file}:weather"], {"weather": {"day": 1}}, r"no setting 'day'.*did you mean days\? it has api_key, days"),
        (["{file}:weather"], {"weather": {"days": 1.5}}, r"tool_config.weather.days: .*must be integer, not 1.5"),
        (["{file}:weather"], {"weather": {"api_key": ["hush"]}}, "tool_config.weather.api_key is of the wrong type.$"),
        (["{file}:Dice"], {}, "the tool dice needs the setting sides: .*tool_config.dice.sides="),
        (["{file}:wether"], {}, r"has no function 'wether'; did you mean weather\?"),
        (["{file}"], {}, "could mean several tools\n.*\n.*use one of: weather, lookup, Dice"),
        (["{file}x.py:weather"], {}, "does not exist"),
        (["no_such_module.weather"], {}, "there is no module no_such_module for the tool"),
        (["json.dumps"], {}, "the tool dumps .*cannot|the parameter obj of the tool dumps has no type hint"),
        (["fractions.Fraction"], {}, "Fraction is no tool"),
    ],
)
def test_what_cannot_be_had_is_said_in_words(file, names, settings, why):
    with pytest.raises(UserError, match=f"(?s){why}") as caught:
        make_tools([name.replace("{file}", str(file)) for name in names], settings)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("count", [0, -1, "4", None])
@pytest.mark.parametrize("line", ["weather.at_once = {}", "Dice.at_once = {}"])
def test_a_tool_that_could_never_be_called_is_an_error_that_names_at_once(file, line, count):
    file.write_text(FILE + line.format(repr(count)))
    with pytest.raises(UserError, match=f"has at_once={count!r}: it must be an integer, 1 or more"):
        make_tools([f"{file}:{line.partition('.')[0]}"], {"dice": {"sides": 6}} if line[0] == "D" else {})


@pytest.mark.parametrize(
    ("text", "why"),
    [("def f(:\n", "syntax error in .*line 1"), ("import no_such_thing\n", "No module named 'no_such_thing'"),
     ("raise SystemExit(3)\n", "failed: SystemExit: 3"), ("x = 1\n", "has no function")],
)  # fmt: skip
def test_a_file_that_cannot_be_imported_is_said_in_words(tmp_path, text, why, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(UserError, match=why):
        make_tools([f"{tmp_path}/bad.py"], {})


def test_functions_and_classes_can_be_registered_under_a_name_that_is_free():
    @register_tool("double")
    async def doubled(x: int) -> int:
        """Doubles a number."""
        return 2 * x

    register_tool("double")(doubled)  # a cell of a notebook that runs twice
    with pytest.raises(ValueError, match="`double` is already registered by"):
        register_tool("double")(lambda x: x)
    tools = make_tools(["double"], {})
    assert tools["double"].schema["function"]["name"] == "double"
    assert texts(tools, ToolCall("double", {"x": 4})) == ["8"]


def test_tools_need_neither_torch_nor_transformers():
    code = """
import sys
from posttrain.conversations.tools.base import ToolCall
from posttrain.conversations.tools.registry import make_tools
from posttrain.conversations.tools.runner import ToolRunner
with ToolRunner(make_tools(["calculator"], {}), timeout_s=60, max_chars=99, side="left") as runner:
    (answer,) = runner.answer(0, [ToolCall("calculator", {"expression": "2+3"})]).result()
    print(answer.text, {"torch", "transformers", "numpy"} & set(sys.modules))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[0] == "5 set()"


@pytest.mark.slow
@pytest.mark.parametrize("first", ["old", "new"])
def test_import_paths_of_earlier_files_give_the_same_modules(first):
    """A second copy of a module would have a registry and base classes of its own."""
    old = (
        "from posttrain.rollout.tools.base import Tool as A\nfrom posttrain.rollout.tools.registry import TOOLS as B\n"
    )
    old += "from posttrain.rollout.agents.registry import AGENTS as C\n"
    new = "import posttrain.conversations.tools.base as a, posttrain.conversations.tools.registry as b\n"
    new += "import posttrain.conversations.agents as c\n"
    code = (old + new if first == "old" else new + old) + "assert A is a.Tool and B is b.TOOLS and C is c.AGENTS\n"
    code += "print(a.__spec__.name)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "posttrain.conversations.tools.base\n", result.stderr
