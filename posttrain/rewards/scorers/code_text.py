"""Extracts the program from a response."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings

from posttrain.rewards.answers import find_tagged

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
