"""Environments of the package verifiers: `actor_rollout_ref.rollout.agent=verifiers:NAME`.

verifiers drives the model itself, by a base URL. So its environment is a program that is started once for the run
(`programs.py`), in the interpreter of `agent.python`: the package does not fit together with many others.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from posttrain.conversations.settings import AGENT_KEY as KEY
from posttrain.conversations.settings import VERIFIERS, AgentSettings
from posttrain.errors import UserError
from posttrain.external import find_missing

_WORKER = Path(__file__).with_name("verifiers_worker.py")


def as_program(settings: AgentSettings) -> AgentSettings:
    """Settings in which an environment of verifiers is a program; others as they are. UserError without the package."""
    name = settings.path or ""
    if not name.startswith(VERIFIERS):
        return settings
    if why := find_missing(settings.python, "verifiers"):
        raise UserError(
            f"the environment {name} cannot be used: {why}.\n"
            "  to do:  python -m venv OWN && OWN/bin/pip install verifiers (its packages do not fit together with the "
            f"trainer's), and {KEY}.python=OWN/bin/python"
        )
    # -P: the folder of the worker is no place to import from; modules there have names that others have, too.
    config = {"taskset": name.removeprefix(VERIFIERS), "settings": settings.config}
    command = [settings.python or sys.executable, "-P", str(_WORKER), "play", json.dumps(config)]
    return replace(settings, path=None, program=shlex.join(command), program_per="run", config={})
