"""What the checks share: the run that they examine (`Case`) and what they found (`Report`), as a page or as JSON.

Imports no torch, so that a misspelt setting is reported at once.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.config.resolved import Problem, Resolved
from posttrain.config.schema import lookup
from posttrain.config.trees import PPO, Tree
from posttrain.rewards.pool import pool_size

if TYPE_CHECKING:
    from posttrain.planning.memory_plan import Device, Planner

# The run would stop or could not learn; it would do something probably not intended; worth knowing.
ERROR, WARNING, NOTE = "error", "warning", "note"
CONFIGURATION = "configuration"
_MISSING = re.compile(r"the (?:file|folder) (.+?) does not exist\.")
# How the checks of the settings, which come first, name a missing path and a broken file of a model.
_BROKEN = re.compile(r": in (?P<folder>\S+), (?P<words>.+)\.$")
STATUS = {ERROR: 2, WARNING: 1, NOTE: 0}  # level -> exit status of the command


@dataclass(frozen=True)
class Finding:
    level: str
    area: str
    what: str
    where: str = ""
    do: str = ""

    @classmethod
    def of(cls, problem: Problem, area: str, level: str = ERROR) -> Finding:
        return cls(level, area, problem.what, problem.where, problem.do)

    def __str__(self) -> str:
        lines = [f"{self.level}, {self.area}: {self.what}"]
        lines += [f"   where: {self.where}"] if self.where else []
        lines += [f"   what to do: {self.do}"] if self.do else []
        return "\n".join(lines)


@dataclass
class Report:
    """Facts by area, and findings."""

    facts: dict[str, list[str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def fact(self, area: str, *sentences: str) -> None:
        self.facts.setdefault(area, []).extend(sentences)

    def add(self, findings: Iterable[Finding]) -> None:
        """Add those that are new. A missing or broken file, which many checks stumble over, is reported once."""
        for finding in findings:
            if cause := self._known_cause(finding):
                sentence = f"Not looked at, as {cause}."
                if sentence not in self.facts.get(finding.area, []):
                    self.fact(finding.area, sentence)
            elif not any((known.level, known.what) == (finding.level, finding.what) for known in self.findings):
                self.findings.append(finding)

    def _known_cause(self, finding: Finding) -> str | None:
        # The missing path or broken file behind this error, if the settings' check has already reported it.
        if finding.level != ERROR or (finding.area == CONFIGURATION and finding.where):
            return None
        for known in (known.what for known in self.findings if known.area == CONFIGURATION):
            if found := _MISSING.search(known):
                if re.search(rf"(?:file |folder |=)(?:/\S*/)?{re.escape(found[1])}(?!\w)", finding.what):
                    return f"{found[1]} does not exist"
            elif (found := _BROKEN.search(known)) and all(part in finding.what for part in found.groups()):
                return found["words"]
        return None

    @property
    def serious(self) -> list[Finding]:
        """Errors, then warnings."""
        return [f for level in (ERROR, WARNING) for f in self.findings if f.level == level]

    @property
    def exit_status(self) -> int:
        """2 with an error, 1 with a warning, else 0."""
        return max((STATUS[finding.level] for finding in self.findings), default=0)

    def verdict(self) -> str:
        errors, warnings = (sum(f.level == level for f in self.findings) for level in (ERROR, WARNING))
        if not errors and not warnings:
            return "No problem was found."
        counted = [f"{n} {word}{'s' * (n > 1)}" for n, word in ((errors, "error"), (warnings, "warning")) if n]
        end = "the run would not work" if errors else f"look at {'it' if warnings == 1 else 'them'} before you start"
        return f"{' and '.join(counted)}: {end}."

    def text(self) -> str:
        lines: list[str] = []
        for area, sentences in self.facts.items():
            lines += [area, *(f"  {line}" for sentence in sentences for line in sentence.splitlines()), ""]
        shown = {finding.what for finding in self.serious}
        notes = [finding for finding in self.findings if finding.level == NOTE and finding.what not in shown]
        if notes:
            lines += ["notes", *(f"  {note.area}: {note.what}" + f" ({note.do})" * bool(note.do) for note in notes), ""]
        lines.append(self.verdict())
        lines += [f"{number}. {finding}" for number, finding in enumerate(self.serious, start=1)]
        return "\n".join(lines)

    def to_json(self) -> str:
        content = {
            "exit_status": self.exit_status,
            "verdict": self.verdict(),
            "findings": [asdict(finding) for finding in self.findings],
            "facts": self.facts,
        }
        return json.dumps(content, indent=2, ensure_ascii=False)


SPLITS = ("train", "val")


@dataclass(frozen=True)
class Run:
    """A run's length: training steps, optimizer steps, and the most checkpoints on disk at a time."""

    steps: int
    updates: int
    saves: int


@dataclass
class Case:
    """`config` is a copy, because checks adjust sizes to the data. Later checks read what earlier ones filled in."""

    resolved: Resolved
    tree: Tree
    report: Report
    config: Any = None
    # By split, filled by the check of the data: rows as in the files, tokenized rows (missing if they cannot be read),
    # and how many rows of the whole file training would use.
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    datasets: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    turns: Any = None  # the ConversationLoop with the run's tools and agents, filled by their check
    schemas: list[dict[str, Any]] = field(default_factory=list)  # of the run's tools; every prompt contains them
    reward_s: float = 0.0  # seconds of one call of the reward, filled by its check
    run: Run | None = None  # filled by the check of the batch

    def __post_init__(self) -> None:
        self.config = copy.deepcopy(self.resolved.config)

    @property
    def is_rl(self) -> bool:
        return self.tree is PPO

    @property
    def is_pairs(self) -> bool:
        """Whether a reward model is trained."""
        return self.tree.main == "reward_model_trainer"

    @property
    def model(self) -> Any:
        return lookup(self.config, self.tree.model)

    @property
    def optim(self) -> tuple[str, Any]:
        """(key, settings) of the optimizer."""
        key = "actor_rollout_ref.actor.optim" if self.is_rl else "optim"
        return key, lookup(self.config, key)

    @cached_property
    def tokenizer(self) -> Any:
        """Raises ModelError if it cannot be loaded."""
        from posttrain.models.loading import load_tokenizer

        return load_tokenizer(self.model)

    @cached_property
    def model_config(self) -> Any:
        """The model's config.json as transformers reads it."""
        from posttrain.planning.meta_models import _model_settings

        return _model_settings(self.model, self.model.path)

    @cached_property
    def device(self) -> Device:
        from posttrain.planning.memory_plan import find_device

        return find_device(self.config)

    @cached_property
    def planner(self) -> Planner:
        from posttrain.planning.budgets import planner_for

        return planner_for(self.config)

    @cached_property
    def parameters(self) -> int:
        """Numbers in the trained model's weights, adapters included."""
        role = "actor" if self.is_rl else "model"
        return self.planner.count(self.config, self.device, role, _parameter_count)

    @property
    def responses(self) -> int:
        """Responses of a training step; a batch that was not set is no larger than the data."""
        data = self.config.data
        return min(data.train_batch_size, self.counts["train"]) * self.config.actor_rollout_ref.rollout.n

    @property
    def scoring_s(self) -> float:
        """Seconds in which the run's reward workers score the responses of a step."""
        return self.reward_s * self.responses / pool_size(self.config.reward.num_workers)

    @property
    def model_folder(self) -> Path | None:
        """The folder of the weights, if it is a local one."""
        folder = Path(str(self.model.path)).expanduser()
        return folder if folder.is_dir() else None

    def where(self, *keys: str) -> str:
        return ", and ".join(dict.fromkeys(f"{key} ({self.resolved.where(key)})" for key in keys))


def _parameter_count(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())
