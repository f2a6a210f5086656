"""What `posttrain bench algorithms` trains: every preset, and every estimator and loss that no preset has.

An estimator runs with the loss `vanilla`, a loss with the estimator `grpo`, all on the embedded task. `TUNED` holds
what differs from the preset's own values, with the reason; there is no other place for such settings.
"""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.config.choices import ESTIMATORS, POLICY_LOSSES
from posttrain.config.presets import PRESETS
from posttrain.errors import UserError

_ACTOR = "actor_rollout_ref.actor"
_ESTIMATOR, _LOSS = "algorithm.adv_estimator", f"{_ACTOR}.policy_loss.loss_mode"
_GROUP = "algorithm/"

Tuning = tuple[tuple[str, ...], str]

# Name -> (settings, why).
TUNED: dict[str, Tuning] = {
    "dapo": (
        ("actor_rollout_ref.rollout.n=5", "algorithm.filter_groups.metric=score", "reward.overlong_buffer.len=1"),
        "groups of 5 as all others, not 16; the reward is one number; answers have at most 3 tokens of 4",
    ),
    "remax": (
        ("actor_rollout_ref.rollout.n=5",),
        "1,000 responses a step as all others, not 200",
    ),
    "ppo": (
        ("critic.optim.lr=1e-3",),
        "the critic starts from a model that never saw a value; at its default 1e-5 it needs thousands of updates",
    ),
    "gpg_loss": (
        ("algorithm.adv_estimator=gpg", f"{_ACTOR}.ppo_mini_batch_size=200", f"{_ACTOR}.optim.lr=1e-3"),
        "right for one update per batch only, with the estimator of its name; a quarter of the updates, so larger ones",
    ),
    "geo_mean": ((f"{_ACTOR}.clip_ratio_low=0.4",), "the paper's clip"),
    "dppo_tv": (
        (f"{_ACTOR}.clip_ratio_low=0.2", f"{_ACTOR}.clip_ratio_high=0.2", f"{_ACTOR}.clip_ratio_c=20"),
        "its clip is a distance of probabilities, 0.1 to 0.2",
    ),
    "dppo_kl": (
        (f"{_ACTOR}.clip_ratio_low=0.05", f"{_ACTOR}.clip_ratio_high=0.05", f"{_ACTOR}.clip_ratio_c=20"),
        "its clip is a KL, about 0.05",
    ),
}


@dataclass(frozen=True)
class Entry:
    """One row of the table. `kind` says what the name is: preset, estimator or loss."""

    name: str
    kind: str
    chosen: tuple[str, ...]  # the settings that select it

    @property
    def settings(self) -> tuple[str, ...]:
        return (*self.chosen, *self.tuned[0])

    @property
    def tuned(self) -> Tuning:
        return TUNED.get(self.name, ((), ""))


def entries() -> list[Entry]:
    """All rows; what is registered anew is among them."""
    presets = {name.removeprefix(_GROUP): values for name, (_, values) in PRESETS.items() if name.startswith(_GROUP)}
    covered = {values.get(key) for values in presets.values() for key in (_ESTIMATOR, _LOSS)} | {"vanilla"}
    rows = [Entry(name, "preset", (f"algorithm={name}",)) for name in presets]
    rows += [Entry(name, "estimator", (f"{_ESTIMATOR}={name}",)) for name in ESTIMATORS if name not in covered]
    taken = {row.name for row in rows}
    for name in POLICY_LOSSES:
        if name not in covered:
            rows.append(Entry(f"{name}_loss" if name in taken else name, "loss", (f"{_LOSS}={name}",)))
    return rows


def choose(only: str | None) -> list[Entry]:
    """The rows named in `--only a,b`, in the table's order; all without it."""
    rows = entries()
    if only is None:
        return rows
    names = {name.strip() for name in only.split(",") if name.strip()}
    known = [row.name for row in rows]
    if unknown := sorted(names.difference(known)):
        raise UserError(f"--only names {', '.join(unknown)}; known: {', '.join(known)}")
    if not names:
        raise UserError(f"--only names nothing; known: {', '.join(known)}")
    return [row for row in rows if row.name in names]
