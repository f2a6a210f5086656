"""The answer to a key of verl: honoured, translated, not needed or not supported, and in which words.

All rules are tried in one order. docs/verl_keys.md lists what happens to every key known of verl.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from posttrain.config.merge import Entry, Merged
from posttrain.config.resolved import Problem
from posttrain.config.trees import Tree
from posttrain.config.values import parse_yaml
from posttrain.other_systems.verl.actor import ACTOR_RULES
from posttrain.other_systems.verl.rollout import ALGORITHM_RULES, ROLLOUT_RULES
from posttrain.other_systems.verl.rule import (
    HONOURED,
    NOT_NEEDED,
    NOT_SUPPORTED,
    ON,
    PACKED,
    TRANSLATED,
    Rule,
    Rules,
    given,
    number,
    plain,
    refuse,
)
from posttrain.other_systems.verl.run import GENERATION, RUN_RULES, SUPERVISED_RULES
from posttrain.other_systems.verl.translations import CONDITIONS, TRANSLATIONS

PPO_RULES: tuple[Rule, ...] = (*ACTOR_RULES, *ROLLOUT_RULES, *ALGORITHM_RULES, *RUN_RULES)


@cache
def _rules(supervised: bool) -> Rules:
    return Rules(SUPERVISED_RULES if supervised else PPO_RULES)


@cache
def find_rule(key: str, *, supervised: bool = False) -> Rule | None:
    """The first rule that knows the key."""
    return _rules(supervised).find(key)


KEYS_FILE = Path(__file__).with_name("keys.txt")


@cache
def verl_keys() -> dict[str, str]:
    """Every key known of verl -> its program: `main_ppo`, `sft_trainer` or `main_generation`."""
    keys, program = {}, ""
    # A file rather than code: it is read only for a misspelt key, for the docs and by `posttrain compat`.
    for line in KEYS_FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            program = line.strip("[]")
        elif line and not line.startswith("#"):
            keys[line] = program
    return keys


class Answer(NamedTuple):
    """What is done with a key."""

    kind: str
    # In words; empty where a setting here has the key's name.
    says: str
    rule: Rule | None = None


def answer(key: str, tree: Tree) -> Answer | None:
    """The answer to a key of this tree's program; None for an unknown key."""
    # The same lookup as for a command line, so that the page cannot differ from what a run does.
    found = tree.canonical(key)
    if found.key is not None and found.key == key and tree.leaf_of(key) is not None:
        return Answer(HONOURED, "")
    if found.key is not None and tree.leaf_of(found.key) is not None:
        return Answer(TRANSLATED, f"`{found.key}`")
    if found.key is not None:
        return Answer(TRANSLATED, "it follows from other settings; a value that contradicts them is an error")
    if found.answer is not None:
        return Answer(found.answer.kind, in_words(found.answer), found.answer)
    return Answer(NOT_SUPPORTED, found.not_built) if found.not_built else None


def in_words(rule: Rule) -> str:
    """The rule's row in one sentence."""
    if rule.kind != NOT_SUPPORTED:
        return rule.says
    fine = [f"`{value}`" for value in rule.off if not rule.switch]
    only = f" (an error only where {rule.switch} is on)" if rule.switch else ""
    accepted = f" ({' and '.join(fine)} {'is' if len(fine) == 1 else 'are'} accepted)" if fine else ""
    return f"{rule.says}; {rule.do}{only}{accepted}"


def all_answers() -> Iterator[tuple[str, str, Answer | None]]:
    """(key, program, answer) of every key known of verl."""
    from posttrain.config.trees import PPO, SFT

    for key, program in verl_keys().items():
        if program == "main_generation":
            yield key, program, Answer(*GENERATION[key]) if key in GENERATION else None
        else:
            yield key, program, answer(key, SFT if program == "sft_trainer" else PPO)


# Keys of verl are answered: translated ones take effect, the others become notes or problems, one per reason.


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
            # A translation may reject the value; its problem is then the answer to the key.
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


# Values that have another name in verl.

_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
_VAL = "actor_rollout_ref.rollout.val_kwargs"
_RULES = "algorithm.rollout_correction.rollout_rs"
# (key, value) -> the value here.
WORDS: dict[tuple[str, str], object] = {
    (_RULES, "token"): "token_k1",
    (_RULES, "sequence"): "seq_sum_k1",
    (_RULES, "geometric"): "seq_mean_k1",
    ("algorithm.adv_estimator", "grpo_vectorized"): "grpo",
    ("algorithm.adv_estimator", "rloo_vectorized"): "rloo",
    ("trainer.save_freq", "0"): -1,
    ("trainer.test_freq", "0"): -1,
    ("trainer.total_training_steps", "-1"): None,
    ("trainer.device", "gpu"): "cuda",
}
# Loggers of verl that write what every run writes: `metrics.jsonl`.
IN_FILES = ("file",)


def translate_values(merged: Merged) -> None:
    """Replace other words by ours, and say so."""
    for (key, word), value in WORDS.items():
        entry = merged.entries.get(key)
        if entry is not None and plain(entry.value) == word:
            entry.value = value
            merged.note(f"`{entry.spelling}={word}` is read as {'null' if value is None else value}.")
    _after_each_epoch(merged)
    _packed(merged)
    _greedy(merged)
    _no_adapter(merged)
    _loggers(merged)


def _after_each_epoch(merged: Merged) -> None:
    """verl's word for saving or validating at the end of an epoch: with one epoch, the end of the run."""
    for key in ("trainer.save_freq", "trainer.test_freq"):
        entry = merged.entries.get(key)
        if entry is None or plain(entry.value) != "after_each_epoch":
            continue
        if number(merged, "trainer.total_epochs", merged.names.leaves["trainer.total_epochs"].default) == 1:
            merged.note(f"`{entry.spelling}=after_each_epoch` is read as -1: the run has one epoch.")
        else:
            refuse(merged, entry, "how often is a number of steps", f"set {key} to the steps of an epoch")
        entry.value = -1


def _packed(merged: Merged) -> None:
    """verl pads rows for models that Megatron-Core cannot pack, and its scripts say so beside the engine."""
    if all(given(merged, key) != "megatron" for key in ("model_engine", f"{_ACTOR}.model_engine", "engine")):
        return
    for key in (f"{_MODEL}.use_remove_padding", "critic.model.use_remove_padding", "model.use_remove_padding"):
        entry = merged.entries.get(key)
        if entry is not None and plain(entry.value) == "false":
            entry.value = True
            merged.note(f"`{entry.spelling}=False` is read as True: {PACKED}.")


def _greedy(merged: Merged) -> None:
    """Temperature 0 in validation is the most likely token."""
    entry = merged.entries.get(f"{_VAL}.temperature")
    if entry is None or plain(entry.value) not in ("0", "0.0"):
        return
    # A temperature of 0 cannot be divided by; engines take a switch for the likeliest token.
    del merged.entries[f"{_VAL}.temperature"]
    sample = merged.entries.get(f"{_VAL}.do_sample")
    if sample is not None and plain(sample.value) in ("true", "1"):
        sample.value = False
        merged.note(f"`{entry.spelling}=0` takes the most likely token: {_VAL}.do_sample=False.")


def _no_adapter(merged: Merged) -> None:
    """Alpha 0 beside rank 0, as scripts write that there is no adapter."""
    for model in ("actor_rollout_ref.model", "critic.model", "model"):
        alpha, rank = (merged.entries.get(f"{model}.lora_{name}") for name in ("alpha", "rank"))
        if alpha is not None and plain(alpha.value) == "0" and (rank is None or plain(rank.value) in ("0", "null")):
            del merged.entries[f"{model}.lora_alpha"]
            merged.note(f"`{alpha.spelling}=0` is not needed here: without a rank there is no adapter.")


def _loggers(merged: Merged) -> None:
    entry = merged.entries.get("trainer.logger")
    if entry is None:
        return
    text = entry.value
    try:
        names = parse_yaml(text) if isinstance(text, str) and text.strip().startswith("[") else text
    except ValueError:
        return
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    if isinstance(names, list) and any(name in IN_FILES for name in names):
        entry.value = [name for name in names if name not in IN_FILES]
        merged.note("The logger `file` writes what every run writes: metrics.jsonl in its directory.")
