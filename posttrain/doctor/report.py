"""What the doctor found, where, and what to do: as a page for people and as JSON for scripts.

Without torch: the settings are read first, and a misspelt one is answered at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from posttrain.config.resolved import Problem

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
            return "Nothing was found that speaks against this run."
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
