"""Keys of verl are answered: translated ones take effect, the others become notes or problems, one per reason."""

from __future__ import annotations

from collections.abc import Iterable

from posttrain.config.merge import Entry, Merged
from posttrain.config.resolved import Problem
from posttrain.other_systems.verl.rule import NOT_NEEDED, NOT_SUPPORTED, TRANSLATED, Rule
from posttrain.other_systems.verl.translations import CONDITIONS, ON, TRANSLATIONS, given, translate_values


def apply_answers(merged: Merged) -> dict[str, tuple[str, str]]:
    """Answer what `Merged.add` put aside; other words for values are translated as well.

    Gives for each such key, as it was written, its answer with this value and the words that go with it.
    """
    translate_values(merged)
    given_answers: dict[str, tuple[str, str]] = {}
    notes: dict[str, list[str]] = {}
    refused: dict[Rule, list[Entry]] = {}
    for key, entry in merged.elsewhere.items():
        rule: Rule = entry.answer
        if rule.how:
            # A translation may refuse the value; the answer to the key is then what it said.
            before = len(merged.problems)
            TRANSLATIONS[rule.how](merged, key, entry)
            new = merged.problems[before:]
            given_answers[entry.spelling] = (NOT_SUPPORTED, _brief(new[0])) if new else (TRANSLATED, rule.says)
        elif rule.kind == NOT_SUPPORTED and not _idle(merged, rule, key, entry):
            # By rule: ten keys of one feature are one problem with ten names, not ten problems.
            refused.setdefault(rule, []).append(entry)
            given_answers[entry.spelling] = (NOT_SUPPORTED, f"{rule.says}; {rule.do}")
        elif entry.explicit:
            why = rule.says if rule.kind == NOT_NEEDED else _off(merged, rule, key)
            notes.setdefault(why, []).append(entry.spelling)
            given_answers[entry.spelling] = (NOT_NEEDED, why)
    for rule, entries in refused.items():
        merged.problems.append(_problem(rule, entries))
    for why, keys in notes.items():
        verb = "is" if len(keys) == 1 else "are"
        merged.note(f"{_list_keys(keys)} {verb} not needed here: {why}.")
    return given_answers


def _brief(problem: Problem) -> str:
    return f"{problem.what.partition(': ')[2].rstrip('.')}; {problem.do}"


def _idle(merged: Merged, rule: Rule, key: str, entry: Entry) -> bool:
    """Whether an unsupported key is set to a value that disables the feature."""
    if rule.asks_for_nothing(entry.value):
        return True
    if rule.switch and rule.switch_of(key) != key:
        return given(merged, rule.switch_of(key)) not in ON
    return bool(rule.idle) and CONDITIONS[rule.idle](merged, key)


def _off(merged: Merged, rule: Rule, key: str) -> str:
    if rule.switch and rule.switch_of(key) != key:
        return f"{rule.switch_of(key)} is not on"
    return f"with this value the feature is off ({rule.says})"


def _problem(rule: Rule, entries: list[Entry]) -> Problem:
    keys = [f"{entry.spelling}={entry.value}" for entry in entries]
    where = ", and ".join(dict.fromkeys(entry.source for entry in entries))
    return Problem(f"{_list_keys(keys)} cannot be used: {rule.says}.", where, rule.do or "remove the key")


def _list_keys(keys: Iterable[str], most: int = 6) -> str:
    shown = [f"`{key}`" for key in keys]
    rest = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + rest
