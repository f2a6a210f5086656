"""Hydra's command line, read here so that every mistake gets a sentence: options, group choices, `key=value`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.config.checked import dialect
from posttrain.config.resolved import Problem
from posttrain.spelling import lost_lines, script_above, suggest

_WITH_VALUE = {
    "--config-path": "config_path",
    "-cp": "config_path",
    "--config-name": "config_name",
    "-cn": "config_name",
    "--config-dir": "config_dir",
    "-cd": "config_dir",
    "--cfg": "cfg",
    "-c": "cfg",
}
_SWITCHES = {"--resolve": "resolve", "--help": "help", "-h": "help"}
_REFUSED = {
    "--multirun": "sweeps are not offered: one command is one run; start one run per value in a shell loop",
    "-m": "sweeps are not offered: one command is one run; start one run per value in a shell loop",
    "--info": "use `--cfg job`, or `posttrain config`, to see the composed tree",
    "--hydra-help": "use `--help`",
    "--shell-completion": "shell completion is not offered",
    "--experimental-rerun": "a run directory holds `config.yaml`; a run continues by itself when started again",
}
_KEY = re.compile(r"[a-z_]+(\.[a-z_]+)+")
_OVERRIDE = re.compile(r"^(?P<sign>\+\+|\+|~)?(?P<key>[A-Za-z_][\w./@:-]*)(?P<value>=.*)?$", re.DOTALL)
CUT_SHORT = (
    "a comment after `\\`, a comment line or an empty line inside a continued command cuts it short: the keys after it "
    "never arrive. Write the keys on lines that end in `\\` with nothing after it, and comments above the command"
)


@dataclass
class CommandLine:
    """What the arguments said."""

    config_path: str | None = None
    config_name: str | None = None
    config_dir: str | None = None
    # `job` or `all`: print the tree instead of training.
    cfg: str | None = None
    resolve: bool = False
    help: bool = False
    # (choice as Hydra takes it, source).
    groups: list[tuple[str, str]] = field(default_factory=list)
    # (key, text, source), in order.
    values: list[tuple[str, str, str]] = field(default_factory=list)
    # (key, source) of `~key`.
    removed: list[tuple[str, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    # Whether a file or a group's choice that was asked for could not be read.
    misses_files: bool = False


def nothing_given(do: str) -> Problem:
    """The answer to a start with no argument at all."""
    what = "No argument was given, so there is nothing to train."
    return Problem(what, "command line", f"give at least {do}. If you did give keys: {CUT_SHORT}.")


def parse_options(args: Sequence[str], program: str = "ppo_trainer") -> tuple[CommandLine, list[str]]:
    """Options taken off; the overrides that remain, in order. `program`: the main file of the command's tree."""
    line, rest, stray = CommandLine(), [], []
    queue = [str(arg) for arg in args]
    while queue:
        arg = queue.pop(0)
        name, equals, value = arg.partition("=")
        if not arg.strip():
            where = "command line: an argument that consists of blanks"
            line.problems.append(Problem("A comment after `\\` cut this command short.", where, CUT_SHORT + "."))
        elif arg.startswith("#"):
            stray.append(arg)
        elif name in _WITH_VALUE:
            if not equals and not queue:
                what = f"The option `{name}` has no value."
                line.problems.append(Problem(what, "command line", f"write {name} VALUE"))
                continue
            setattr(line, _WITH_VALUE[name], value if equals else queue.pop(0))
        elif arg in _SWITCHES:
            setattr(line, _SWITCHES[arg], True)
        elif arg in ("--run", "-r"):
            continue
        elif name in _REFUSED:
            line.problems.append(Problem(f"The option `{name}` is not taken.", "command line", _REFUSED[name]))
        elif name.startswith("-"):
            line.problems.append(_unknown_option(name, program))
            if not equals and queue and "=" not in queue[0] and not queue[0].startswith(("-", "#", "~")):
                queue.pop(0)  # its value
        elif (not equals and not arg.startswith("~")) or not name:
            stray.append(arg)
        else:
            rest.append(arg)
    if stray:
        line.problems.append(_stray(stray))
    if line.cfg not in (None, "job", "all"):
        what = f"`--cfg {line.cfg}` is not offered."
        line.problems.append(Problem(what, "command line", "use `--cfg job` or `--cfg all`"))
    return line, rest


def _unknown_option(name: str, program: str) -> Problem:
    hint = suggest(name, [option for option in [*_WITH_VALUE, *_SWITCHES] if option.startswith("--")])
    if said := dialect(program).advice(name):
        return Problem(f"Unknown option `{name}`.", "command line", f"{said}; settings are given as key=value")
    do = f"{hint}settings are given as key=value; `--help` lists the options. Flags such as `--lr` belong to train.sh"
    return Problem(f"Unknown option `{name}`.", "command line", do)


def _stray(arguments: list[str]) -> Problem:
    listed = ", ".join(f"`{text}`" for text in arguments[:8]) + (", ..." if len(arguments) > 8 else "")
    what = f"These arguments are not settings (key=value): {listed}."
    file = next((Path(text) for text in arguments if text.endswith((".yaml", ".yml"))), None)
    if any(text.startswith("=") for text in arguments):
        do = "write key=value without spaces around `=`"
    elif len(arguments) > 1 and _KEY.fullmatch(arguments[0]):
        do = f"write `{arguments[0]}={arguments[1]}`, as key=value without a blank"
    elif file is not None:
        do = f"name a file of settings by --config-path={file.parent} --config-name={file.stem}"
    else:
        do = (
            "write every setting as key=value. If they are words of a comment: a comment inside a command reached the "
            f"program; {CUT_SHORT}"
        )
    return Problem(what, "command line", do + ".")


def add_override(line: CommandLine, text: str, source: str, is_group: Callable[[str], bool]) -> None:
    """Sort one override into `line`: a group choice, a value, or a problem."""
    match = _OVERRIDE.match(text.strip())
    if match is None or (match["value"] is None and match["sign"] != "~"):
        line.problems.append(_stray([text]))
        return
    sign, key, value = match["sign"] or "", match["key"], (match["value"] or "=")[1:]
    if sign == "~":
        line.removed.append((key, source))
    elif key.split(".")[0] == "hydra":
        do = "remove it: Hydra's run folder and sweeper are off; runs are written to trainer.default_local_dir"
        line.problems.append(Problem(f"`{key}` is a setting of Hydra itself.", source, do))
    elif "." not in key.split("@")[0] and is_group(key.split("@")[0]):
        line.groups.append((f"{'+' if sign == '+' else ''}{key}={value}", source))
    else:
        line.values.append((key, value, source))


def find_lost_lines(args: Sequence[str]) -> list[Problem]:
    """The problem of a command that was cut short, none where nothing is known of its script."""
    text, name = script_above() or ("", "")
    lost = lost_lines(text, args)
    return [cut_short(lost, name)] if lost else []


def cut_short(lost: Sequence[tuple[int, str]], where: str = "script") -> Problem:
    """The problem that (number, text) of these lines are."""
    shown = "; ".join(f"line {number}: `{line}`" for number, line in lost[:4]) + ("; ..." if len(lost) > 4 else "")
    what = f"This command was cut short: {len(lost)} lines of its arguments never arrive ({shown})."
    return Problem(what, where, f"{CUT_SHORT}.")
