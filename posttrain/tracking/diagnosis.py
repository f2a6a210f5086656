"""diagnose: one plain line about a step, and advice when something needs attention.

A rule is a function of what is known about the run up to now that returns a sentence of advice, or None. Rules use only
the names of `metrics.py`; no rule is built on `policy_loss`, which stays near 0 on-policy and says little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.tracking.row import STAGE_WORDS

LINE = 82
"""Columns of a step's line; with `step 10000/10000: ` before it, it fits one row of 100."""
WINDOW = 10
"""Steps over which a trend is judged; none is claimed before there are that many."""
FIRST_STEPS = 5
"""KL starts at 0, so its lower bound counts only after this many steps."""


@dataclass
class RunFacts:
    """The settings that rules speak about."""

    kl_on: bool = False
    lr: float | None = None
    kl_coef: float | None = None
    n: int = 1
    clip_ratio: float = 0.2
    loss_agg_mode: str = "token-mean"
    grouped: bool = True
    """Whether advantages compare the responses of a group."""


@dataclass
class Known:
    """The present step's metrics and those before it, oldest first."""

    now: Mapping[str, float]
    past: Sequence[Mapping[str, float]] = ()
    run: RunFacts = field(default_factory=RunFacts)

    def get(self, name: str) -> float | None:
        """The present value, None if it is absent or not finite."""
        return _finite(self.now.get(name))

    def series(self, name: str, last: int | None = None) -> list[float]:
        """The values of the last steps, this one included, those that are present and finite."""
        values = [_finite(metrics.get(name)) for metrics in [*self.past, self.now]]
        found = [value for value in values if value is not None]
        return found if last is None else found[-last:]

    def change(self, name: str) -> float | None:
        """By how much the mean of the window's second half exceeds its first half's; None before the window is full."""
        values = self.series(name, WINDOW)
        if len(values) < WINDOW:
            return None
        half = WINDOW // 2
        return math.fsum(values[half:]) / (WINDOW - half) - math.fsum(values[:half]) / half

    def is_noise(self, name: str) -> bool:
        """Whether the change over the window is within twice what the scatter of its halves explains."""
        values, half = self.series(name, WINDOW), WINDOW // 2
        scatter = math.sqrt((_variance(values[:half]) + _variance(values[half:])) / half)
        return abs(self.change(name) or 0.0) <= 2 * scatter


Rule = Callable[[Known], str | None]


def rewards_all_zero(known: Known) -> str | None:
    """Every reward of the last steps is 0: more often a broken comparison than a hopeless model."""
    bounds = known.series("critic/score/max", 3) + known.series("critic/score/min", 3)
    if len(bounds) < 2 or any(bounds):
        return None
    return (
        "All rewards are 0. Check that the ground truth scores 1 against itself: the reward may look for a mark (such "
        "as '####' or \\boxed) that truth or responses do not have, and responses may be cut off before the answer. "
        "`posttrain reward try --data FILE` tests this."
    )


def reward_failures(known: Known) -> str | None:
    """The reward function raised, hung or gave no number."""
    failures = known.get("reward/failures") or 0
    if not failures:
        return None
    return (
        f"The reward failed on {failures:.0f} responses; the samples' column `error` says why "
        "(reward.timeout_s is the limit)."
    )


def groups_without_signal(known: Known) -> str | None:
    """Most groups have equal rewards, so they teach nothing."""
    share = known.get("groups/no_signal")
    if share is None or share < 0.7 or not known.run.grouped:
        return None
    right, wrong = known.get("groups/all_right") or 0.0, known.get("groups/all_wrong") or 0.0
    if right > wrong:
        cause = "most are all right: take harder prompts"
    elif wrong > right:
        cause = "most are all wrong: take easier prompts or a finer reward"
    else:
        cause = "their rewards do not differ: a finer reward helps"
    return (
        f"{share:.0%} of the groups have equal rewards and give no gradient; {cause}, or more responses per prompt "
        f"(actor_rollout_ref.rollout.n={known.run.n} now)."
    )


def reward_falls(known: Known) -> str | None:
    """The reward has fallen over the window by more than its scatter."""
    change = known.change("reward_mean")
    if change is None or change >= 0 or known.is_noise("reward_mean"):
        return None
    return f"The reward fell by {-change:.3g} over the last {WINDOW} steps. {_steadier(known)}"


def update_unstable(known: Known) -> str | None:
    """Updates skipped, much clipped, or a gradient far above its habit."""
    clipped = known.get("actor/pg_clipfrac") or 0.0
    gradients = known.series("actor/grad_norm")
    usual = sorted(gradients[:-1])[len(gradients[:-1]) // 2] if len(gradients) > WINDOW else None
    if known.get("actor/bad_steps"):
        sign = "An update was skipped because loss or gradient was not finite"
    elif clipped > 0.3:
        sign = f"{clipped:.0%} of the tokens are clipped"
    elif usual and gradients[-1] > 10 * usual:
        sign = f"The gradient norm {gradients[-1]:.3g} is {gradients[-1] / usual:.0f} times its median"
    else:
        return None
    return f"{sign}. {_steadier(known)}"


def kl_out_of_range(known: Known) -> str | None:
    """KL against the reference outside 0.001 to 0.1; it is 0 at the start, and absent when KL is off."""
    kl = known.get("kl_loss")
    if kl is None or not known.run.kl_on:
        return None
    if kl > 0.1:
        return f"kl_loss {kl:.3g} is above 0.1: the policy is far from its reference. {_steadier(known)}"
    if kl < 0.001 and len(known.series("kl_loss")) > FIRST_STEPS:
        return (
            f"kl_loss {kl:.2g} is below 0.001 after {len(known.series('kl_loss'))} steps: the policy hardly moves. A "
            "higher actor_rollout_ref.actor.optim.lr or a lower actor_rollout_ref.actor.kl_loss_coef lets it."
        )
    return None


def length_drifts(known: Known) -> str | None:
    """Responses grow or shrink. A reward that pays for length and a loss that favours it need different remedies."""
    change, lengths = known.change("response_length"), known.series("response_length", WINDOW)
    start = math.fsum(lengths[: WINDOW // 2]) / (WINDOW // 2) if change is not None else 0.0
    if change is None or start == 0 or abs(change) / start < 0.2 or known.is_noise("response_length"):
        return None
    drift = f"Responses {'grew' if change > 0 else 'shrank'} by {abs(change) / start:.0%} over the last {WINDOW} steps"
    if change < 0:
        return f"{drift}. Look whether the reward pays for short answers."
    right, wrong = known.get("response_length/right/mean"), known.get("response_length/wrong/mean")
    gain = known.change("reward_mean") or 0.0
    if gain > 0 and not known.is_noise("reward_mean") and (wrong is None or right is None or right >= wrong):
        return (
            f"{drift}, and the reward with them: look at samples whether the reward pays for length itself; then the "
            "reward must change (a length penalty), not the loss."
        )
    if known.run.loss_agg_mode == "seq-mean-token-sum-norm":
        return f"{drift}, without more reward. Look at the samples, or lower data.max_response_length."
    return (
        f"{drift}, without more reward: the loss may favour long wrong answers. "
        f"actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm (now {known.run.loss_agg_mode}) takes that out."
    )


def responses_cut_off(known: Known) -> str | None:
    """Many responses end at the length limit."""
    share = known.get("response_length/clip_ratio")
    if share is None or share < 0.3:
        return None
    return (
        f"{share:.0%} of the responses are cut off at data.max_response_length; raise it, or ask for shorter answers."
    )


RULES: tuple[Rule, ...] = (
    reward_failures,
    rewards_all_zero,
    groups_without_signal,
    reward_falls,
    update_unstable,
    kl_out_of_range,
    length_drifts,
    responses_cut_off,
)


def diagnose(
    metrics: Mapping[str, float],
    history: Sequence[Mapping[str, float]] = (),
    facts: RunFacts | None = None,
    *,
    step: int | None = None,
    width: int = LINE,
) -> tuple[str, list[str]]:
    """(the step in one line, sentences of advice); `history` holds the metrics of the steps before, oldest first."""
    known = Known(metrics, history, facts or RunFacts())
    line = ("" if step is None else f"step {step}: ") + fitted(_summary(known), width)
    return line, [advice for rule in RULES if (advice := rule(known))]


def fitted(pieces: Sequence[tuple[int, str | None]], width: int) -> str:
    """(importance, text) in order, joined; what does not fit is left out, least important first."""
    kept = [(importance, text) for importance, text in pieces if text]
    while len(kept) > 1 and len(", ".join(text for _, text in kept)) > width:
        kept.remove(min(kept))
    return ", ".join(text for _, text in kept)


def _summary(known: Known) -> list[tuple[int, str | None]]:
    return [
        (9, _reward(known)),
        (7, _signal(known)),
        (6, _kl(known)),
        (2, _clipping(known)),
        (5, _length(known)),
        (4, _speed(known)),
        (8, _seconds(known)),
        (3, _bound(known)),
    ]


def _reward(known: Known) -> str | None:
    """With its change over the window where that is more than scatter."""
    reward, change = known.get("reward_mean"), known.change("reward_mean")
    if reward is None:
        return None
    trend = "" if change is None or known.is_noise("reward_mean") else f" ({change:+.3f})"
    return f"reward {reward:.3f}{trend}"


def _signal(known: Known) -> str | None:
    share = known.get("groups/no_signal")
    return None if share is None or not known.run.grouped else f"{share:.0%} no signal"


def _kl(known: Known) -> str | None:
    kl = known.get("kl_loss")
    return f"KL {kl:.2g}" if kl is not None and known.run.kl_on else None


def _clipping(known: Known) -> str | None:
    clipped = known.get("actor/pg_clipfrac")
    return None if clipped is None else f"clip {clipped:.1%}"


def _length(known: Known) -> str | None:
    length, change = known.get("response_length"), known.change("response_length")
    if length is None:
        return None
    drift = "" if change is None or known.is_noise("response_length") else f" ({change:+.0f})"
    return f"length {length:.0f}{drift}"


def _speed(known: Known) -> str | None:
    speed = known.get("perf/throughput")
    return None if speed is None else f"{speed:,.0f} tok/s"


def _times(known: Known) -> tuple[float, dict[str, float]]:
    """(seconds of the step, seconds of its stages)."""
    prefix = "timing_s/"
    times = {name.removeprefix(prefix): value for name, value in known.now.items() if name.startswith(prefix)}
    total = times.pop("step", None) or math.fsum(times.values())
    return total, times


def _seconds(known: Known) -> str | None:
    total, _ = _times(known)
    return f"{total:.1f} s" if total > 0 else None


def _bound(known: Known) -> str | None:
    """The stage that bounds the step, if one takes more than half of it."""
    total, times = _times(known)
    first = max(times, key=lambda name: times[name], default=None)
    if first is None or times[first] <= total / 2:
        return None
    return f"{STAGE_WORDS.get(first, first)}-bound"


def stage_shares(metrics: Mapping[str, float]) -> str | None:
    """Where a step's time went, longest first."""
    total, times = _times(Known(metrics))
    ordered = sorted(times.items(), key=lambda item: -item[1])
    shares = [f"{STAGE_WORDS.get(name, name)} {value / total:.0%}" for name, value in ordered if total > 0]
    return ", ".join(shares) or None


def _steadier(known: Known) -> str:
    """What makes training steadier, in the order of trust; a wider clip comes last, as it loosens the constraint."""
    run = known.run
    lr = f" ({run.lr:g} now; try {run.lr / 5:g})" if run.lr else ""
    kl = (
        f" (actor.kl_loss_coef={run.kl_coef:g} now)"
        if run.kl_on and run.kl_coef is not None
        else " (actor.use_kl_loss=true)"
    )
    return (
        f"In this order: lower actor_rollout_ref.actor.optim.lr{lr}, {'more' if run.kl_on else 'add'} KL against the "
        f"reference{kl}, more responses per prompt (rollout.n={run.n} now), and only then "
        f"a wider clip (actor.clip_ratio={run.clip_ratio:g} now)."
    )


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _variance(values: Sequence[float]) -> float:
    centre = math.fsum(values) / len(values)
    return math.fsum((value - centre) ** 2 for value in values) / max(1, len(values) - 1)
