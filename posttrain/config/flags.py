"""`train.sh`'s flags and environment variables as overrides with their source, for `load_config(labelled=...)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posttrain.config.aliases import ENVIRONMENT, FLAGS
from posttrain.config.problem import ConfigError, Problem

Labelled = list[tuple[str, str]]


def from_shell(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Labelled, list[str]]:
    """(overrides with labels, lowest rank first; arguments left for the command line).

    A flag wins over its environment variable; `--flag value`, `--flag=value` and `--rollout-n` are taken.
    """
    present = [(name, key) for name, key in ENVIRONMENT.items() if name in environ]
    labelled = [(f"{key}={environ[name]}", f"environment variable {name}") for name, key in present]
    rest: list[str] = []
    problems: list[Problem] = []
    queue = list(argv)
    while queue:
        argument = queue.pop(0)
        name, equals, value = argument.partition("=")
        flag = "--" + name[2:].replace("-", "_") if name.startswith("--") else name
        if flag not in FLAGS:
            rest.append(argument)
            continue
        if not equals:
            if not queue or queue[0].startswith("--"):
                problems.append(Problem(f"The flag `{flag}` has no value.", "command line", f"write `{flag} VALUE`"))
                continue
            value = queue.pop(0)
        labelled.append((f"{FLAGS[flag]}={value}", f"flag {flag}"))
    if problems:
        raise ConfigError(problems)
    return labelled, rest
