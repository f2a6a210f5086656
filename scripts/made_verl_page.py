"""docs/verl_keys.md, made from the answers to verl's keys; `scripts/generate.py` writes it."""

from __future__ import annotations

from collections.abc import Iterable

from posttrain.other_systems.verl.answers import Answer, all_answers
from posttrain.other_systems.verl.rule import HONOURED, KINDS, NOT_NEEDED, NOT_SUPPORTED, TRANSLATED

_HEAD = """# verl's keys

Made by `python scripts/generate.py` from the tables in `posttrain/other_systems/verl/`. Every key of verl's
configuration trees (releases 0.7 and 0.9, and its head in August 2026) and of 416 public run scripts gets one of four
answers; [coming_from_verl.md](coming_from_verl.md) says how a script is brought over, and `posttrain compat check
SCRIPT` gives the answers for a script. In patterns `*` stands for anything, `{a,b}` for either.
"""
_PROGRAMS = {
    "main_ppo": "`verl.trainer.main_ppo`",
    "sft_trainer": "`verl.trainer.sft_trainer`",
    "main_generation": "`verl.trainer.main_generation`",
}
_ABOUT = {
    TRANSLATED: "They are translated. The resolved configuration shows the setting, and the key that you wrote.",
    NOT_NEEDED: "A note at the start says why; the run continues.",
    NOT_SUPPORTED: "An error that says why, and what to use instead. A value that disables the feature gives a note.",
    HONOURED: "A setting of the same name has the same meaning: [settings.md](settings.md), "
    "[settings_sft.md](settings_sft.md).",
}

Row = tuple[str, str, Answer]


def verl_keys_page() -> str:
    """The whole page."""
    rows: list[Row] = [(key, program, found) for key, program, found in all_answers() if found is not None]
    parts = [_HEAD, _counts(rows)]
    for kind in (TRANSLATED, NOT_NEEDED, NOT_SUPPORTED, HONOURED):
        chosen = [row for row in rows if row[2].kind == kind]
        parts.append(f"## {kind.capitalize()}\n\n{_ABOUT[kind]}\n")
        parts.append(_list_by_section(chosen) if kind == HONOURED else _table(chosen))
    return "\n".join(parts)


def _counts(rows: list[Row]) -> str:
    lines = [f"| program | {' | '.join(KINDS)} | all |", "|---|" + "---:|" * (len(KINDS) + 1)]
    for program, name in _PROGRAMS.items():
        lines.append(_count_row(name, [found.kind for _, of, found in rows if of == program]))
    return "\n".join([*lines, _count_row("together", [found.kind for _, _, found in rows])]) + "\n"


def _count_row(name: str, kinds: list[str]) -> str:
    return f"| {name} | {' | '.join(str(kinds.count(kind)) for kind in KINDS)} | {len(kinds)} |"


def _table(rows: Iterable[Row]) -> str:
    """One row per rule, or per key that has no rule."""
    counted: dict[tuple[str, str], int] = {}
    for key, program, found in rows:
        shown = found.rule.pattern if found.rule else key
        where = "" if program == "main_ppo" else f" ({program})"
        counted[f"`{shown}`{where}", found.says] = counted.get((f"`{shown}`{where}", found.says), 0) + 1
    lines = ["| key | keys | |", "|---|---:|---|"]
    lines += [f"| {key} | {count} | {says.replace('|', chr(92) + '|')} |" for (key, says), count in counted.items()]
    return "\n".join(lines) + "\n"


def _list_by_section(rows: Iterable[Row]) -> str:
    """The keys by section."""
    sections: dict[str, list[str]] = {}
    for key, program, _ in rows:
        section, _, name = key.rpartition(".")
        sections.setdefault(f"`{section}`" + ("" if program == "main_ppo" else f" ({program})"), []).append(f"`{name}`")
    lines = ["| section | keys |", "|---|---|"]
    return "\n".join([*lines, *(f"| {section} | {', '.join(names)} |" for section, names in sections.items())]) + "\n"
