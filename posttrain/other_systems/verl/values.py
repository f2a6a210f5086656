"""Values that verl's users write under keys that are settings here: other words for the same thing."""

from __future__ import annotations

from posttrain.config.merge import Merged
from posttrain.config.values import parse_yaml
from posttrain.other_systems.verl.rule import plain

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
    _greedy(merged)
    _no_adapter(merged)
    _loggers(merged)


def _greedy(merged: Merged) -> None:
    """Temperature 0 in validation is the most likely token."""
    entry = merged.entries.get(f"{_VAL}.temperature")
    if entry is None or plain(entry.value) not in ("0", "0.0"):
        return
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
