"""What loading gives: a Resolved configuration with the source of every value, or a ConfigError with all problems."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from posttrain.config.schema import leaves, lookup, nest
from posttrain.errors import UserError
from posttrain.texts import redact
from posttrain.yaml_text import dump_yaml, one_line


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration."""

    # What is wrong, as a sentence.
    what: str
    # Where it was set: "command line", "config/grpo.yaml", "environment variable LEARNING_RATE", ...
    where: str = ""
    # What to do about it.
    do: str = ""
    # Canonical keys concerned; used to drop follow-up problems of a key that could not be read at all.
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        labelled = {"where": self.where, "what to do": self.do}
        return "\n".join([self.what, *(f"   {label}: {text}" for label, text in labelled.items() if text)])


class ConfigError(UserError):
    """A configuration that cannot be run; `problems` holds everything that was found, not only the first thing."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = list(problems)
        super().__init__(self._text())

    def _text(self) -> str:
        """Overridden where a problem is not one of the configuration (`explain`)."""
        body = "\n".join(f"{i}. {problem}" for i, problem in enumerate(self.problems, 1))
        count = f"{len(self.problems)} problem{'s' * (len(self.problems) != 1)}"
        return f"{count} in the configuration:\n{body}"


@dataclass
class Resolved:
    """What `load_config` gives."""

    # The typed tree: a PPOConfig, SFTConfig or RewardModelConfig.
    config: Any
    # Canonical key -> "command line", "config/grpo.yaml", "flag --lr", ..., "default"; with the spelling if another.
    sources: dict[str, str]
    # Printed at start, one sentence each.
    notes: list[str] = field(default_factory=list)
    # Canonical keys that the user set: command line, file, flag, environment variable.
    explicit: set[str] = field(default_factory=set)
    # The file whose defaults list was composed.
    main_file: str = "posttrain/trainer/config/ppo_trainer.yaml"
    # Sections of the user's own groups, by dotted key; only `${...}` references read them.
    extra: dict[str, Any] = field(default_factory=dict)
    # What the command line asked to print instead of training: `help`, `job` or `all` (from `--cfg`).
    show: str | None = None
    # Which machine of the run this is (`trainer.node_rank`): 0 drives it. Of the command, and not of the run: it is
    # never stored.
    node_rank: int = 0
    # Whether the run is only to be looked at (`trainer.dry_run`); of the command, too.
    dry_run: bool = False

    def value(self, key: str) -> Any:
        """The value of a canonical key."""
        return lookup(self.config, key)

    def where(self, key: str) -> str:
        """Where a canonical key was set."""
        return self.sources.get(key, "default")

    def values(self) -> dict[str, Any]:
        """All values by canonical key."""
        return {key: lookup(self.config, key) for key in leaves(type(self.config))}

    def to_yaml(self) -> str:
        """The tree as YAML, secrets masked."""
        return dump_yaml(redact(nest(self.extra, self.config.to_dict())), allow_unicode=True)

    def describe(self) -> str:
        """The tree with value, source and sentence of every key, secrets masked."""
        lines = [f"# defaults from {self.main_file}"]
        for key, leaf in leaves(type(self.config)).items():
            lines.append(f"{key}: {one_line(redact({key: self.value(key)})[key])}    # {self.where(key)}")
            if leaf.sentence:
                lines.append(f"    {leaf.sentence}")
        for key, value in self.extra.items():
            lines.append(f"{key}: {one_line(redact({key: value})[key])}    # your own section")
        if self.notes:
            lines += ["", *(f"note: {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"
