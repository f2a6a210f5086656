"""Resolved: a checked configuration with the source of every value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from posttrain.config import show
from posttrain.config.schema import leaves, lookup


@dataclass
class Resolved:
    """What `load_config` gives."""

    config: Any
    """The typed tree: a PPOConfig, SFTConfig or RewardModelConfig."""
    sources: dict[str, str]
    """Canonical key -> "command line", "config/grpo.yaml", "flag --lr", ..., "default"; with the spelling if
    another."""
    notes: list[str] = field(default_factory=list)
    """Printed at start, one sentence each."""
    explicit: set[str] = field(default_factory=set)
    """Canonical keys that the user set: command line, file, flag, environment variable."""
    main_file: str = "posttrain/trainer/config/ppo_trainer.yaml"
    """The file whose defaults list was composed."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Sections of the user's own groups, by dotted key; only `${...}` references read them."""
    show: str | None = None
    """What the command line asked to print instead of training: `help`, `job` or `all` (from `--cfg`)."""
    node_rank: int = 0
    """Which machine of the run this is (`trainer.node_rank`): 0 drives it. Of the command, and not of the run: it is
    nowhere stored."""
    dry_run: bool = False
    """Whether the run is only to be looked at (`trainer.dry_run`); of the command, too."""

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
        return show.to_yaml(self)

    def describe(self) -> str:
        """The tree with value, source and sentence of every key, secrets masked."""
        return show.show(self)
