"""The tests of a coding task, out of the forms in which data sets write them.

calls:  {"fn_name": "f", "inputs": [[1, 2], ...], "outputs": [3, ...]}                      (APPS, TACO, LeetCode)
stdin:  {"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}                                (APPS, CodeContests)
        [{"input": ..., "output": ..., "testtype": "stdin" | "functional"}, ...]             (LiveCodeBench)
code:   ["assert f(1, 2) == 3", ...], {"test_list": [...], "test_imports": [...]}            (MBPP)
        {"test": "def check(candidate): ...", "entry_point": "f", "prompt": "def f(..."}     (HumanEval)
        a text of test code: asserts, test functions or unittest cases                       (KodCode)
Each may also come as a JSON text.

`extract_program` finds the program in a response.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
import warnings
from dataclasses import dataclass, field
from typing import Any

from posttrain.rewards.answers import find_tagged
from posttrain.rewards.types import RewardError
from posttrain.sandbox.wire import encode

# Possessive quantifiers do not backtrack, so no response takes quadratic time.
_FENCE = re.compile(
    r"^[ \t]*+(`{3,}+|~{3,}+)[ \t]*+([\w+-]*+)[^\n]*+\n(.*?)(?:^[ \t]*+\1[ \t]*+$|\Z)", re.MULTILINE | re.DOTALL
)
_PYTHON = {"python", "python3", "py", "py3"}
_THOUGHT = "</think>"


def extract_program(response: str) -> str | None:
    """Return the last fenced block of Python, else the last block, else the whole text if it is Python, else None."""
    text = response.rpartition(_THOUGHT)[2]
    blocks = [(language.lower(), body) for _, language, body in _FENCE.findall(text)]
    for wanted in (_PYTHON, {language for language, _ in blocks}):
        found = [body for language, body in blocks if language in wanted and body.strip()]
        if found:
            return textwrap.dedent(found[-1])
    answer = find_tagged(text)
    whole = text if answer is None else answer[1]
    return whole if whole.strip() and parses(whole) else None


def complete_program(response: str, prompt: str, entry: str) -> str | None:
    """Return the program for a prompt that ends inside a function (HumanEval), which the response may only continue."""
    program = extract_program(response)
    if program is not None and defines(program, entry):
        # The prompt's imports and helpers are part of the task, even if the response does not repeat them.
        return f"{prompt}\n\n{program}" if parses(f"{prompt}\n\n{program}") else program
    for rest in [program, response] if program is not None else [response]:
        for body in (rest, textwrap.indent(textwrap.dedent(rest), "    ")):
            if body.strip() and parses(prompt + body):
                return prompt + body
    return program


def defines(program: str, name: str) -> bool:
    """Whether a program defines a name at its top level."""
    try:
        body = ast.parse(program).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    named = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    if any(node.name == name for node in named):
        return True
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def remove_function(program: str, name: str) -> str:
    """Remove a top-level function from a program; return nothing if the text is not Python."""
    try:
        tree = ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    tree.body = [node for node in tree.body if not (isinstance(node, ast.FunctionDef) and node.name == name)]
    return ast.unparse(tree)


def parses(text: str) -> bool:
    """Whether a text is Python; it is compiled, because `return 1` outside a function can be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, "program", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


_FORMS = (
    "give {fn_name, inputs, outputs}, {inputs, outputs} for standard input, a list of asserts (test_list), "
    "{test, entry_point, prompt}, or test code as a text"
)


@dataclass
class Tests:
    """The tests of one task; `kind` says which of the fields are used."""

    # `calls`, `stdin` or `code`.
    kind: str
    # Arguments of each call, or the text of each standard input.
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    function: str = ""
    codes: list[str] = field(default_factory=list)
    entry: str | None = None
    prompt: str = ""

    def __len__(self) -> int:
        return len(self.codes) if self.kind == "code" else len(self.inputs)

    def for_sandbox(self) -> list[dict[str, Any]]:
        """Return tests of the kinds `calls` and `code` in the form that `Sandbox.test` takes."""
        if self.kind == "calls":
            return [{"call": self.function, "args": [encode(arg) for arg in args]} for args in self.inputs]
        return [{"code": code, "entry": self.entry} for code in self.codes]


def read_tests(ground_truth: Any) -> Tests:
    """Read the tests from a ground truth; RewardError if it holds none."""
    tests = _read(_plain(ground_truth))
    if tests is None or not len(tests):
        shown = " ".join(str(ground_truth).split())[:80]
        raise RewardError(f"the truth of a coding task holds no tests: {shown}", "ground_truth of the data", _FORMS)
    if tests.kind != "code" and len(tests.inputs) != len(tests.outputs):
        raise RewardError(
            f"the truth of a coding task has {len(tests.inputs)} inputs and {len(tests.outputs)} outputs",
            "ground_truth of the data",
            "give one output per input",
        )
    return tests


def _plain(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _read(truth: Any) -> Tests | None:
    if isinstance(truth, str):
        return Tests("code", codes=[truth]) if truth.strip() and parses(truth) else None
    if isinstance(truth, list):
        return _read_list(truth)
    if not isinstance(truth, dict):
        return None
    for key in ("input_output", "ground_truth"):
        if truth.get(key) is not None:
            return _read(_plain(truth[key]))
    if truth.get("inputs") is not None and truth.get("outputs") is not None:
        inputs, outputs = (list(_plain(truth[key])) for key in ("inputs", "outputs"))
        return _pairs(inputs, outputs, truth.get("fn_name") or truth.get("func_name"))
    for key in ("test_list", "tests", "test", "unit_tests", "test_code"):
        if truth.get(key) is not None:
            return _with_setup(_read(_plain(truth[key])), truth)
    return None


def _with_setup(tests: Tests | None, truth: dict[str, Any]) -> Tests | None:
    if tests is not None and tests.kind == "code":
        setup = [*(_plain(truth.get("test_imports")) or []), truth.get("test_setup_code") or ""]
        lines = "\n".join(line for line in setup if line)
        tests.codes = [f"{lines}\n{code}" if lines else code for code in tests.codes]
        tests.entry = truth.get("entry_point") or truth.get("fn_name")
        tests.prompt = truth["prompt"] if isinstance(truth.get("prompt"), str) else ""
        if tests.entry and tests.prompt:
            # Helpers that the prompt defines belong to the tests: a program must not bring its own.
            helpers = remove_function(tests.prompt, tests.entry)
            tests.codes = [f"{helpers}\n{code}" for code in tests.codes]
    return tests


def _read_list(truth: list[Any]) -> Tests | None:
    if truth and all(isinstance(test, str) for test in truth):
        return Tests("code", codes=[test for test in truth if test.strip()])
    if truth and all(isinstance(test, dict) and "input" in test and "output" in test for test in truth):
        metadata = truth[0].get("metadata") or {}
        name = metadata.get("func_name") if isinstance(metadata, dict) else None
        functional = name if truth[0].get("testtype") == "functional" or name else None
        return _pairs([test["input"] for test in truth], [test["output"] for test in truth], functional)
    return None


def _pairs(inputs: list[Any], outputs: list[Any], function: str | None) -> Tests:
    if not function:
        return Tests("stdin", inputs=[_text(one) for one in inputs], outputs=[_text(one) for one in outputs])
    return Tests("calls", inputs=[_arguments(one) for one in inputs], outputs=outputs, function=function)


def _text(value: Any) -> str:
    # Standard input and output; data sets write them as one text or as a list of lines.
    value = value.tolist() if hasattr(value, "tolist") else value
    return "\n".join(map(str, value)) + "\n" if isinstance(value, list) else str(value)


def _arguments(value: Any) -> list[Any]:
    # Arguments of a call: a list of them, or a text with one JSON value per line.
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, str):
        try:
            return [json.loads(line) for line in value.splitlines() if line.strip()]
        except ValueError:
            return [value]
    return list(value) if isinstance(value, list | tuple) else [value]
