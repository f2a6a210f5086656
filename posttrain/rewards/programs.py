"""Before a run whose rows are coding tasks: settings for the scorer, and whether programs can be isolated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from posttrain.config.reward import RewardConfig, SandboxConfig
from posttrain.rewards.scorers import canonical_source
from posttrain.sandbox import Sandbox, SandboxError

_CODE = ("code", "code_generation")
_SHARE = 0.8
"""Share of a score's time that the program may have; the rest is for starting and reading."""

NOT_ISOLATED = (
    "reward.sandbox.mode is unsafe: programs that the model writes run with your rights, can read your files and reach "
    "the network; only time, memory and output are limited"
)


def is_code(data_source: str | None) -> bool:
    """Whether rows of a source are scored by running programs."""
    return canonical_source(str(data_source)) in _CODE


def code_settings(config: RewardConfig) -> dict[str, Any]:
    """Arguments of `scorers.code.configure`; a program's deadline always comes before that of its score."""
    sandbox = config.sandbox.to_dict()
    sandbox["timeout_s"] = min(sandbox["timeout_s"], _SHARE * config.timeout_s)
    return {"sandbox": sandbox, "partial_credit": config.code_partial_credit}


def check_programs(sources: Iterable[str | None], config: SandboxConfig, *, must_run: bool = True) -> list[str]:
    """Notes for a run with these data sources; SandboxError if its programs cannot be isolated.

    Where a function of the user's own scores (`must_run` is False), it may never ask for a sandbox: then it is a note.
    """
    if not any(map(is_code, sources)):
        return []
    if config.mode == "unsafe":
        return [NOT_ISOLATED]
    try:
        with Sandbox(config) as sandbox:
            sandbox.start()
    except SandboxError as error:
        if must_run:
            raise
        return [str(error)]
    return []
