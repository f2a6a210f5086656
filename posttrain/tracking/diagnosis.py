"""diagnose: one line about a step, and advice when something needs attention.

A rule is a function of the metrics so far that returns a sentence of advice, or None. Rules use only the names of
`metrics.py`. None uses `policy_loss`, which stays near 0 on-policy and says little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from posttrain.tracking.step_line import WINDOW, RunFacts, StepFacts, join_within, stage_shares, summary

__all__ = ["RULES", "RunFacts", "StepFacts", "collect_advice", "diagnose", "join_within", "stage_shares"]

LINE = 82  # columns of a step's line; with `step 10000/10000: ` before it, it fits one row of 100
FIRST_STEPS = 5  # KL starts at 0, so its lower bound counts only after this many steps


Rule = Callable[[StepFacts], str | None]


def rewards_all_zero(known: StepFacts) -> str | None:
    """Every reward since the first step is 0: more often a broken comparison than a hopeless model. Rewards that fell
    to 0 are `reward_falls`."""
    if len(known.series("critic/score/max")) + len(known.series("critic/score/min")) < 2 or not _is_all_zero(known):
        return None
    return (
        "All rewards are 0. Check that the ground truth scores 1 against itself: the reward may look for a mark (such "
        "as '####' or \\boxed) that it or the responses do not have, and responses may be cut off before the answer. "
        "`posttrain reward try FN DATA` tests this. Or the prompts do not have the form that the model was trained on: "
        "look at a response (`posttrain samples`) and at the chat template (`posttrain doctor`)."
    )


def reward_failures(known: StepFacts) -> str | None:
    """The reward function raised, hung or gave no number."""
    failures = known.get("reward/failures") or 0
    if not failures:
        return None
    often = f", most often: {known.reward_error}" if known.reward_error else ""
    freq = known.run.samples_freq
    kept = (
        "the samples' column `error` says why"
        if freq == 1
        else f"the samples of every {freq} steps (tracking.samples_freq) hold all errors with their inputs"
        if freq
        else "tracking.samples_freq=1 keeps the errors with their inputs"
    )
    return f"The reward failed on {failures:.0f} responses{often}; {kept}."


def tools_fail(known: StepFacts) -> str | None:
    """A tool answered none of this step's calls."""
    failing = known.get("tools/failing") or 0
    if not failing:
        return None
    said = known.tool_error or f"all calls of {failing:.0f} tools failed"
    return (
        f"{said[0].upper()}{said[1:]}. The model can learn nothing from asking. `posttrain tool try` calls a tool "
        "alone; samples hold each call with its answer."
    )


def groups_without_signal(known: StepFacts) -> str | None:
    """Most groups have equal rewards, so they give no gradient."""
    share = known.get("groups/no_signal")
    if share is None or not known.run.grouped or _is_all_zero(known):
        return None
    right, wrong = known.get("groups/all_right") or 0.0, known.get("groups/all_wrong") or 0.0
    # A run that learns its prompts reaches a high share by itself: warn only when hardly any group is left.
    if share < (0.9 if right > wrong else 0.7):
        return None
    if known.run.temperature < 0.3:
        cause = f"sampling hardly varies: raise actor_rollout_ref.rollout.temperature ({known.run.temperature:g} now)"
    elif right > wrong:
        cause = "most are all right: take harder prompts"
    elif wrong > right:
        cause = "most are all wrong: take easier prompts or a finer reward"
    else:
        cause = "their rewards do not differ: a finer reward helps"
    return (
        f"{share:.0%} of the groups have equal rewards and give no gradient; {cause}, or more responses per prompt "
        f"(actor_rollout_ref.rollout.n={known.run.n} now)."
    )


def reward_falls(known: StepFacts) -> str | None:
    """The reward has fallen, over the window or since the start, by more than scatter and by a share of its spread."""
    highest = max((abs(score) for score in known.series("critic/score/max")), default=0.0)
    least = max(0.3 * (known.start("reward_std") or 0.0), 0.05 * highest)
    recent, whole = known.change("reward_mean"), known.since_start("reward_mean")
    if recent is not None and recent < -least and not known.is_noise("reward_mean"):
        fall = f"by {-recent:.3g} over the last {WINDOW} steps"
    elif whole is not None and whole < -least and not known.is_noise("reward_mean", whole, of=3):
        fall = f"from {known.start('reward_mean'):.3g} in the first steps to {known.recent_mean('reward_mean'):.3g}"
    else:
        return None
    return f"The reward fell {fall}. {_steadier(known)}"


def update_unstable(known: StepFacts) -> str | None:
    """Updates skipped, much clipped, far from the policy that sampled, or a gradient far above its habit."""
    clipped, moved = known.get("actor/pg_clipfrac") or 0.0, known.get("actor/ppo_kl") or 0.0
    gradients = known.series("actor/grad_norm")
    usual = sorted(gradients[:-1])[len(gradients[:-1]) // 2] if len(gradients) > WINDOW else None
    if known.get("actor/bad_steps"):
        sign = "An update was skipped because loss or gradient was not finite"
    elif clipped > 0.3:
        sign = f"{clipped:.0%} of the tokens are clipped"
    elif moved > 0.2:
        sign = f"The updates of one step moved the policy by {moved:.2g} per token (actor/ppo_kl; 0.01 is customary)"
    elif usual and gradients[-1] > 10 * usual:
        sign = f"The gradient norm {gradients[-1]:.3g} is {gradients[-1] / usual:.0f} times its median"
    else:
        return None
    return f"{sign}. {_steadier(known)}"


def kl_out_of_range(known: StepFacts) -> str | None:
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


def length_drifts(known: StepFacts) -> str | None:
    """Responses grow or shrink. A reward that pays for length and a loss that favours it need different remedies."""
    change, lengths = known.change("response_length"), known.series("response_length", WINDOW)
    start = math.fsum(lengths[: WINDOW // 2]) / (WINDOW // 2) if change is not None else 0.0
    if change is None or start == 0 or abs(change) / start < 0.2 or known.is_noise("response_length"):
        return None
    drift = f"Responses {'grew' if change > 0 else 'shrank'} by {abs(change) / start:.0%} over the last {WINDOW} steps"
    if change < 0:
        return f"{drift}. Look whether the reward pays for short answers."
    right, wrong = known.get("response_length/right/mean"), known.get("response_length/wrong/mean")
    gains = (known.change("reward_mean") or 0.0) > 0 and not known.is_noise("reward_mean")
    if gains and (wrong is None or right is None or right >= wrong):
        return (
            f"{drift}, and the reward with them: look at samples whether the reward pays for length itself; then the "
            "reward must change (a length penalty), not the loss."
        )
    why = (
        f"and wrong ones are the longest ({wrong:.0f} tokens, right ones {right:.0f})"
        if gains
        else "without more reward"
    )
    if known.run.loss_agg_mode == "seq-mean-token-sum-norm":
        return f"{drift}, {why}. Look at the samples, or lower data.max_response_length."
    return (
        f"{drift}, {why}: the loss may favour long wrong answers. "
        f"actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm (now {known.run.loss_agg_mode}) takes that out."
    )


def responses_run_on(known: StepFacts) -> str | None:
    """From the first steps on hardly any response ends or is right: probably the wrong chat template."""
    early = known.series("response_length/clip_ratio")[:3]
    right = known.series("right/mean")[:3]
    if not early or not right or min(early) < 0.8 or max(right) > 0.05:
        return None
    return (
        f"From the first step on {min(early):.0%} of the responses do not end, and {max(right):.0%} are right: "
        f"{_OTHER_TEMPLATE} A longer data.max_response_length helps only answers that would end."
    )


def responses_empty(known: StepFacts) -> str | None:
    """The first responses are hardly more than an end token, and hardly any is right: the same cause."""
    first, right = known.series("response_length")[:1], known.series("right/mean")[:1]
    if not first or not right or first[0] >= 2 or right[0] > 0.05:
        return None
    return f"The first responses had {first[0]:.1f} tokens, and {right[0]:.0%} were right: {_OTHER_TEMPLATE}"


_OTHER_TEMPLATE = (
    "the chat template may not be the model's own, or its end token another (actor_rollout_ref.model.tokenizer_path, "
    "data.apply_chat_template_kwargs); `posttrain doctor` looks at both."
)


def responses_cut_off(known: StepFacts) -> str | None:
    """Many responses end at the length limit, and that may be why they are wrong."""
    share, right = known.get("response_length/clip_ratio"), known.get("right/mean")
    if share is None or share < 0.3 or responses_run_on(known):
        return None
    if right is not None and 1 - right < share / 2:
        return None  # most of them are right nevertheless
    return (
        f"{share:.0%} of the responses are cut off at data.max_response_length; raise it, or ask for shorter answers."
    )


def entropy_collapses(known: StepFacts) -> str | None:
    """The policy has become sure of its answers without becoming right: it tries nothing new."""
    start, now, right = (
        known.start("actor/entropy"),
        known.recent_mean("actor/entropy"),
        known.recent_mean("right/mean"),
    )
    if start is None or now is None or now > 0.2 * start:
        return None
    at_first = known.start("right/mean")
    if right is not None and (right > 0.8 or (at_first is not None and right - at_first > (1 - at_first) / 2)):
        return None  # it has learnt: more than half of what was wrong
    share = "" if right is None else f", and {right:.0%} of the responses are right"
    return (
        f"The entropy fell from {start:.2g} to {now:.2g}{share}: the policy is sure of answers and tries no others. "
        "Lower actor_rollout_ref.actor.optim.lr, raise actor_rollout_ref.actor.entropy_coeff (0.001 to 0.02), or widen "
        "the upper clip (actor_rollout_ref.actor.clip_ratio_high=0.28)."
    )


def entropy_grows(known: StepFacts) -> str | None:
    """The policy becomes more and more random, and not better by it."""
    start, now = known.start("actor/entropy"), known.recent_mean("actor/entropy")
    if start is None or now is None or now < max(3 * start, start + 0.3) or _is_all_zero(known):
        return None
    gain = known.since_start("reward_mean") or 0.0
    if gain > 0 and not known.is_noise("reward_mean", gain, of=3):
        return None
    return (
        f"The entropy rose from {start:.2g} to {now:.2g} and the reward did not: responses become random. Lower "
        "actor_rollout_ref.actor.entropy_coeff (0 to 0.02 is customary), then actor_rollout_ref.actor.optim.lr."
    )


def mismatch_rises(known: StepFacts) -> str | None:
    """Rollout and trainer no longer compute the same policy; a gap that is there from the first step is rounding."""
    now, seen = known.recent_mean("mismatch/logp_mean"), known.series("mismatch/logp_mean")
    if now is None or now < 0.01 or (now < 3 * seen[0] and now < 0.05):
        return None
    if known.get("rollout/age"):
        return None  # one-step-off: the rollout's weights are meant to be older
    return (
        f"Rollout and trainer log-probs differ by {now:.2g} per token (mismatch/logp_mean): responses come from other "
        "weights than the trained ones (stale, or computed differently). actor_rollout_ref.rollout.name=hf tells "
        "whether the engine does it; algorithm.rollout_correction.rollout_is=token weighs it out."
    )


def parts_diverge(known: StepFacts) -> str | None:
    """The reward is earned by something else than being right: since the start it rose, and right answers fell."""
    gain, right = known.since_start("reward_mean", WINDOW // 2), known.since_start("right/mean", WINDOW // 2)
    if gain is None or right is None or gain <= 0 or known.is_noise("reward_mean", gain):
        return None
    if right >= -0.02 or known.is_noise("right/mean", right):
        return None
    parts = [name for name in known.now if name.startswith("reward/") and name.endswith("/mean")]
    gains = {name: known.since_start(name) or 0.0 for name in parts if name != "reward/acc/mean"}
    grown = max(gains, key=lambda name: gains[name], default=None)
    by = f" Most of it is {grown} ({gains[grown]:+.2g})." if grown and gains[grown] > 0 else ""
    return (
        f"Since the start the reward rose by {gain:.2g} while the share of right responses fell by {-right:.2g}: it is "
        f"earned by something else.{by} Give that part a lower weight, or let it count for right responses only "
        "(`needs` in reward.functions)."
    )


# Rule -> the metric to look at. Advice is printed in this order.
RULES: dict[Rule, str] = {
    reward_failures: "reward/failures",
    tools_fail: "tools/failing",
    rewards_all_zero: "critic/score/max",
    responses_run_on: "response_length/clip_ratio",
    responses_empty: "response_length",
    groups_without_signal: "groups/no_signal",
    parts_diverge: "right/mean",
    reward_falls: "reward_mean",
    update_unstable: "actor/pg_clipfrac",
    entropy_collapses: "actor/entropy",
    entropy_grows: "actor/entropy",
    mismatch_rises: "mismatch/logp_mean",
    kl_out_of_range: "kl_loss",
    length_drifts: "response_length",
    responses_cut_off: "response_length/clip_ratio",
}


def diagnose(
    metrics: Mapping[str, float],
    history: Sequence[Mapping[str, float]] = (),
    facts: RunFacts | None = None,
    *,
    step: int | None = None,
    width: int = LINE,
    reward_error: str = "",
    tool_error: str = "",
) -> tuple[str, list[str]]:
    """(the step in one line, sentences of advice); `history` holds the metrics of the steps before, oldest first."""
    known = StepFacts(metrics, history, facts or RunFacts(), reward_error, tool_error)
    line = ("" if step is None else f"step {step}: ") + join_within(summary(known), width)
    return line, [advice.text for advice in collect_advice(known)]


class Advice(NamedTuple):
    """The sentence of one rule."""

    rule: str
    metric: str  # the metric that it is about, to be looked at
    text: str


def collect_advice(known: StepFacts) -> list[Advice]:
    """The advice of all rules that apply, in their order."""
    return [Advice(rule.__name__, metric, text) for rule, metric in RULES.items() if (text := rule(known))]


def _is_all_zero(known: StepFacts) -> bool:
    bounds = known.series("critic/score/max") + known.series("critic/score/min")
    return bool(bounds) and not any(bounds)


def _steadier(known: StepFacts) -> str:
    # The safest remedy first; a wider clip comes last, because it loosens the constraint.
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
