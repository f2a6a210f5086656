"""`posttrain compat check SCRIPT [KEY=VALUE ...] [--write FILE]`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from posttrain.config.commandline import lost_lines
from posttrain.errors import UserError
from posttrain.other_systems.verl_script.program import Call, find_calls, find_main_file, main_file
from posttrain.other_systems.verl_script.report import ASSUMED, TREES, Report, as_text, examine
from posttrain.other_systems.verl_script.shell import Script
from posttrain.spelling import OptionParser

_ALWAYS_SET = ("$HOME", "${HOME}", "$USER", "${USER}", "$PWD", "${PWD}")
_VARIABLE = re.compile(r"\$\{?\w")
_COMMANDS = {
    "ppo": "python3 -m posttrain.trainer.main_ppo",
    "sft": "posttrain sft",
    "generation": "python3 -m posttrain.trainer.main_generation",
    "evaluation": "python3 -m posttrain.trainer.main_eval",
}


def main(args: Sequence[str]) -> int:
    """0 if every key is taken, 1 if something is left to change."""
    parser = OptionParser(
        prog="posttrain compat",
        usage="posttrain compat check SCRIPT [KEY=VALUE ...] [--all] [--write FILE]",
        description="Reads a run script of verl, without running it, and says what becomes of each of its keys.",
    )
    parser.add_argument("job", choices=["check"])
    parser.add_argument("script", type=Path, help="a shell script that starts verl")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="further settings, as after the script's own")
    parser.add_argument("--all", action="store_true", help="list the honoured keys too")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the command for posttrain ('-': print it)")
    options = parser.parse_intermixed_args(list(args))
    script, calls = read_script(options.script)
    text = _text(options.script)
    good = True
    written = []
    for call in calls:
        if call.program not in TREES:
            written.append(plain_command(call))
            continue
        report = examine(call, options.settings, lost=lost_lines(text, call.settings), folder=options.script.parent)
        print(as_text(report, every=options.all))
        for line in remarks(call, script, options.script.parent):
            print(line)
        good = good and not report.refused and not report.problems
        written.append(command_of(report))
    if options.write is not None:
        _write(options.write, options.script, written)
    return 0 if good else 1


def read_script(path: Path) -> tuple[Script, list[Call]]:
    """The script and its commands of verl; raises UserError where there is none."""
    script = Script(_text(path))
    calls = find_calls(script)
    if not calls:
        raise UserError(
            f"{path} starts no program of verl: a command such as `python3 -m verl.trainer.main_ppo KEY=VALUE ...` was "
            "looked for. Give the file in which it stands."
        )
    return script, calls


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"There is no file {path}. Give the run script that starts verl.") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder. Give the run script in it that starts verl.") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is no text. Give the run script that starts verl.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None


def remarks(call: Call, script: Script, folder: Path) -> list[str]:
    """What the reader should know beside the keys."""
    lines = []
    if (name := main_file(call.line)) is not None:
        file = find_main_file(call.line, folder)
        lines.append(f"read: {file}" if file else f"not read: the main file {name} (give what it sets as KEY=VALUE)")
    if not call.is_main:
        lines.append(f"{call.module} is a program of its own; posttrain's for it is: {_COMMANDS[call.program]}")
    for text in script.variables.unset:
        keys = [setting.partition("=")[0].lstrip("+") for setting in call.settings if text in setting]
        if keys and text not in _ALWAYS_SET:
            given = "set before it is run" if _VARIABLE.match(text) else "filled in when it is run"
            taken = [f"{ASSUMED[key]} is assumed here" for key in keys if key in ASSUMED]
            lines.append(f"{given}: {text} ({', '.join([*keys[:3], *(['...'] if len(keys) > 3 else []), *taken])})")
    return lines


def plain_command(call: Call) -> str:
    """Generation and evaluation take verl's keys as they are."""
    return _COMMANDS[call.program] + "".join(f" \\\n    {quote_word(setting)}" for setting in call.settings)


def command_of(report: Report) -> str:
    """The command for posttrain, refused keys and their reasons above it."""
    lines = [f"# left out, not supported: {one.setting} ({one.says})" for one in report.refused]
    settings = "".join(f" \\\n    {quote_word(setting)}" for setting in report.settings_here)
    return "\n".join([*lines, f"{_COMMANDS[report.call.program]}{settings}"])


def quote_word(text: str) -> str:
    """A word for the shell in which `$NAME` is still read."""
    if "$" not in text:
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`")
    return f'"{escaped}"'


def _write(target: Path, source: Path, commands: list[str]) -> None:
    text = f"# Written by `posttrain compat check` from {source.name}.\nset -e\n" + "\n\n".join(commands) + ' "$@"\n'
    if str(target) == "-":
        print(text)
        return
    target.write_text(f"#!/usr/bin/env bash\n{text}", encoding="utf-8")
    target.chmod(0o755)
    print(f"written: {target}")
