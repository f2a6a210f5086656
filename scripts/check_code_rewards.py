#!/usr/bin/env python3
"""Scores the canonical solutions of HumanEval and MBPP, and broken copies of them, and compares with plain Python.

    python scripts/check_code_rewards.py HumanEval.jsonl.gz sanitized-mbpp.json [--mutants 4] [--limit 50]

Canonical solutions must score 1. A mutant is the solution with one thing changed: a comparison or an operator turned
round, a constant raised by one, a condition negated, a result left out. Not every mutant is wrong, so what it should
score is found out the plain way: program and tests in one bare Python process that has to reach its end. Takes minutes.
Of HumanEval only the function that is asked for is changed: helpers that the prompt defines are taken from the prompt.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gzip
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from posttrain.rewards import score_by_source
from posttrain.rewards.scorers import code

CANONICAL_S, MUTANT_S = 60.0, 5.0
"""Deadlines: one canonical solution of MBPP (123) takes long, and mutants that never end should not."""
DONE = "all tests were run"
SWAPS = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Mod: ast.Mult, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Check the scorer of code on HumanEval and MBPP.")
    parser.add_argument("humaneval", type=Path)
    parser.add_argument("mbpp", type=Path)
    parser.add_argument("--mutants", type=int, default=4, help="mutants per solution (default 4)")
    parser.add_argument("--limit", type=int, default=10**6, help="tasks of each file")
    options = parser.parse_args()
    print("| data | programs | should score 1 | score 1 | should score 0 | score 0 | disagreements | s |")
    print("|---|---|---|---|---|---|---|---|")
    disagreements: list[str] = []
    for name, tasks in (("HumanEval", humaneval(options.humaneval)), ("MBPP", mbpp(options.mbpp))):
        for kind, mutants in (("canonical", 0), ("mutants", options.mutants)):
            disagreements += check(f"{name}, {kind}", tasks[: options.limit], mutants)
    print("\n".join(disagreements[:20]))
    sys.exit(bool(disagreements))


def humaneval(path: Path) -> list[tuple[str, dict[str, Any], str, str]]:
    """Name, truth, solution, and the tests as a script would run them."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        rows = [json.loads(line) for line in file]
    return [
        (
            row["task_id"],
            {key: row[key] for key in ("test", "entry_point", "prompt")},
            row["prompt"] + row["canonical_solution"],
            f"{row['test']}\ncheck({row['entry_point']})\n",
        )
        for row in rows
    ]


def mbpp(path: Path) -> list[tuple[str, dict[str, Any], str, str]]:
    """As `humaneval`."""
    rows = json.loads(path.read_text())
    return [
        (
            f"MBPP/{row['task_id']}",
            {key: row[key] for key in ("test_list", "test_imports")},
            row["code"],
            "\n".join([*row["test_imports"], *row["test_list"]]),
        )
        for row in rows
    ]


def check(label: str, tasks: list[tuple[str, dict[str, Any], str, str]], mutants: int) -> list[str]:
    """Print one line of the table; the programs on which the scorer and plain Python disagree."""
    seconds = MUTANT_S if mutants else CANONICAL_S
    code.configure({"timeout_s": seconds}, partial_credit=False)
    programs = [
        (name, truth, program, tests)
        for name, truth, solution, tests in tasks
        for program in (
            [solution] if not mutants else pick(list(mutations(solution, truth.get("entry_point"))), mutants)
        )
    ]
    start = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        scored = list(threads.map(lambda p: score_by_source("code", f"```python\n{p[2]}\n```", p[1]), programs))
        took = time.monotonic() - start
        plain = list(threads.map(lambda p: passes_plainly(p[2], p[3], seconds), programs))
    counts = Counter((bool(right), one["score"] == 1.0) for right, one in zip(plain, scored, strict=True))
    wrong = [
        f"! {program[0]}: plain Python says {right}, the scorer {one}\n{program[2]}"
        for program, right, one in zip(programs, plain, scored, strict=True)
        if right != (one["score"] == 1.0)
    ]
    if not mutants:
        wrong += [
            f"! {program[0]} is canonical and fails plainly"
            for program, right in zip(programs, plain, strict=True)
            if not right
        ]
    print(
        f"| {label} | {len(programs)} | {counts[True, True] + counts[True, False]} | {counts[True, True]} "
        f"| {counts[False, False] + counts[False, True]} | {counts[False, False]} | {len(wrong)} | {took:.0f} |",
        flush=True,
    )
    return wrong


def passes_plainly(program: str, tests: str, seconds: float) -> bool:
    """Program and tests in one process; fine for programs that nobody wrote to cheat."""
    script = f"{program}\n\n{tests}\nprint({DONE!r})"  # a program that calls exit() has not passed
    try:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=seconds, text=True)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and DONE in done.stdout


def mutations(source: str, function: str | None) -> Iterator[str]:
    """The source with one thing changed, for every thing that can be (in one function only, if it is named)."""
    tree = ast.parse(source)
    for place in range(len(_nodes(tree, function))):
        changed = copy.deepcopy(tree)
        if _mutate(_nodes(changed, function)[place]):
            yield ast.unparse(ast.fix_missing_locations(changed))


def _nodes(tree: ast.Module, function: str | None) -> list[ast.AST]:
    tops = [node for node in tree.body if function is None or getattr(node, "name", None) == function]
    return [node for top in tops for node in ast.walk(top)]


def _mutate(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        node.ops[0] = SWAPS[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPS:
        node.op = SWAPS[type(node.op)]()
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        node.value += 1
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Return) and node.value is not None:
        node.value = ast.Constant(None)
    else:
        return False
    return True


def pick(mutants: list[str], count: int) -> list[str]:
    """That many, spread evenly over the program."""
    return [mutants[i * len(mutants) // count] for i in range(count)] if len(mutants) > count else mutants


if __name__ == "__main__":
    main()
