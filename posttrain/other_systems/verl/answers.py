"""The answer to a key of verl: honoured, translated, not needed or not supported, and in which words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from posttrain.config.tree import Tree
from posttrain.other_systems.verl.rule import HONOURED, NOT_SUPPORTED, TRANSLATED, Rule
from posttrain.other_systems.verl.supervised import GENERATION
from posttrain.other_systems.verl.tables import verl_keys


class Answer(NamedTuple):
    """What is done with a key."""

    kind: str
    # In words; empty where a setting here has the key's name.
    says: str
    rule: Rule | None = None


def answer(key: str, tree: Tree) -> Answer | None:
    """The answer to a key of this tree's program; None for a key that nobody knows."""
    names = tree.spellings
    found = names.canonical(key)
    if found.key is not None and found.key == key and names.leaf_of(key) is not None:
        return Answer(HONOURED, "")
    if found.key is not None and names.leaf_of(found.key) is not None:
        return Answer(TRANSLATED, f"`{found.key}`")
    if found.key is not None:
        return Answer(TRANSLATED, "checked against the settings that it follows from")
    if found.answer is not None:
        return Answer(found.answer.kind, in_words(found.answer), found.answer)
    return Answer(NOT_SUPPORTED, found.not_built) if found.not_built else None


def in_words(rule: Rule) -> str:
    """The rule's row in one sentence."""
    if rule.kind != NOT_SUPPORTED:
        return rule.says
    fine = [f"`{value}`" for value in rule.off if not rule.switch]
    only = f" (only where {rule.switch} is on)" if rule.switch else ""
    taken = f" ({' and '.join(fine)} {'is' if len(fine) == 1 else 'are'} taken)" if fine else ""
    return f"{rule.says}; {rule.do}{only}{taken}"


def all_answers() -> Iterator[tuple[str, str, Answer | None]]:
    """(key, program, answer) of every key known of verl."""
    from posttrain.config.ppo_tree import PPO
    from posttrain.config.supervised_tree import SFT

    for key, program in verl_keys().items():
        if program == "main_generation":
            yield key, program, Answer(*GENERATION[key]) if key in GENERATION else None
        else:
            yield key, program, answer(key, SFT if program == "sft_trainer" else PPO)
