"""`--set SYSTEM:KEY=VALUE`, `--env SYSTEM:NAME=VALUE`: other settings of a system than those it has here.

`--also NEW=SYSTEM` adds a second row of a system, so that two sets of settings are measured in the same alternation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from posttrain.bench.systems import System
from posttrain.errors import UserError


def tuned(
    systems: Sequence[System],
    variables: Sequence[str],
    settings: Sequence[str],
    also: Sequence[str] = (),
    pythons: Sequence[str] = (),
) -> list[System]:
    """The systems with these on top of their own; `also` adds a second row of one, under another name.

    An empty value takes a variable away.
    """
    wanted = {system.name: system for system in systems}
    for text in also:
        new, _, name = text.partition("=")
        if name not in wanted or new in wanted or not new.replace("-", "").replace("_", "").isalnum():
            raise UserError(f"--also {text}: give NEWNAME=SYSTEM, SYSTEM being {', '.join(wanted)}")
        wanted[new] = replace(wanted[name], name=new)
    for text in pythons:
        name, _, path = text.partition("=")
        if name not in wanted or not path or wanted[name].ours:
            peers = ", ".join(system.name for system in wanted.values() if not system.ours)
            raise UserError(f"--python {text}: give SYSTEM=PATH, SYSTEM being {peers}")
        wanted[name] = replace(wanted[name], python=path)
    for option, texts in (("--env", variables), ("--set", settings)):
        for text in texts:
            name, colon, rest = text.partition(":")
            key, equals, value = rest.partition("=")
            if not colon or not equals or not key or name not in wanted:
                raise UserError(f"{option} {text}: give SYSTEM:KEY=VALUE, SYSTEM being {', '.join(wanted)}")
            system = wanted[name]
            if option == "--env" and key == "LD_PRELOAD" and not value:
                wanted[name] = replace(system, preload=None)
            elif option == "--env":
                change = {key: value} if value else {}
                kept = {k: v for k, v in system.variables.items() if k != key} | change
                cuda = system.cuda and {k: v for k, v in system.cuda.items() if k != key} | change
                wanted[name] = replace(system, variables=kept, cuda=cuda)
            else:
                wanted[name] = replace(system, settings={**system.settings, key: _read(value)})
    return list(wanted.values())


def _read(value: str) -> Any:
    """A number, true, false, null or a JSON object; anything else is text."""
    try:
        return json.loads(value)
    except ValueError:
        return value
