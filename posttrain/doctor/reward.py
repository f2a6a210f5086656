"""The reward on real rows: right answers above wrong ones, the same twice, in time, without exceptions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from posttrain.doctor.case import Case
from posttrain.doctor.finding import ERROR, NOTE, WARNING, Finding
from posttrain.errors import UserError
from posttrain.rewards.findings import Findings, timing
from posttrain.rewards.functions import asks_sources, named_sources
from posttrain.rewards.loading import resolve_reward
from posttrain.rewards.programs import check_programs, code_settings
from posttrain.rewards.scorers import check_sources
from posttrain.rewards.tryout import examine
from posttrain.rewards.types import RewardSpec

AREA = "reward"
ROWS = 24
"""Rows that are tried; each is asked about a dozen times."""
PATIENCE_S = 20.0
SLOW_S = 0.5
MARKS = {"\\boxed{}": "boxed", "####": "####", "<answer>": "<answer>"}
"""Spelling of `posttrain reward try` -> what a prompt that asks for it holds."""


def check_reward(case: Case) -> Iterator[Finding]:
    if not case.is_rl:
        return
    config = case.config
    named = bool(config.custom_reward_function.path or config.reward.functions)
    if config.reward_model.enable and not named:
        case.report.fact(AREA, f"Rewards come from the reward model {config.reward_model.model.path}.")
        return
    try:
        spec = resolve_reward(config.custom_reward_function, functions=config.reward.functions)
        yield from _sources(case, spec)
        spec.code = code_settings(config.reward)
    except UserError as error:
        yield Finding(ERROR, AREA, str(error), case.where("custom_reward_function.path"))
        return
    items = list(case.datasets.get("train", []))
    if not items:
        return
    yield from _tried(
        case, spec, [items[place * len(items) // min(ROWS, len(items))] for place in range(min(ROWS, len(items)))]
    )


def _sources(case: Case, spec: RewardSpec) -> Iterator[Finding]:
    sources = {
        source or case.config.data.data_source for data in case.datasets.values() for source in data.data_sources
    }
    by_source, named = asks_sources(spec), named_sources(spec)
    if by_source and sources:
        check_sources(sources)
    for note in check_programs(sources | named, case.config.reward.sandbox, must_run=by_source or bool(named)):
        yield Finding(NOTE, AREA, note)


def _tried(case: Case, spec: RewardSpec, items: Sequence[Any]) -> Iterator[Finding]:
    limits, where = case.config.reward, spec.label
    rows = [
        {"data_source": item["data_source"], "ground_truth": item["ground_truth"], "extra_info": item["extra_info"]}
        for item in items
    ]
    how: dict[str, Any] = {"default_source": case.config.data.data_source, "timeout_s": limits.timeout_s}
    how["num_workers"] = limits.num_workers or 1
    try:
        found = examine(rows, spec, patience_s=PATIENCE_S, **how)
    except UserError as error:
        yield Finding(ERROR, AREA, str(error), where)
        return
    if found.seconds:
        case.report.fact(AREA, f"{where}; {timing(found.seconds)}.")
    yield from _failures(found, where, limits.timeout_s)
    if found.best and not found.errors:
        best = sum(found.best) / len(found.best)
        told = sum(gap > 0 for gap in found.told_apart)
        case.report.fact(
            AREA,
            f"{len(found.best)} rows tried: truths score {best:.3g} on average; in {told} of {len(found.told_apart)} "
            "rows the truth scores above another row's truth.",
        )
        yield from _judgement(found, where)
        yield from _marks(found, where, items)
    for row, form, first, second in found.flaky[:1]:
        what = f"The same response gets another score when it is asked for again (row {row}, {form}: {first:g}, then "
        what += f"{second:g}; {len(found.flaky)} of all): the reward depends on something besides the response."
        yield Finding(WARNING, AREA, what, where, "let it depend on its arguments alone (no clock, no shared state)")
    if found.seconds and sum(found.seconds) / len(found.seconds) > SLOW_S:
        yield from _slow(case, found, where)


def _failures(found: Findings, where: str, timeout_s: float) -> Iterator[Finding]:
    total = sum(found.errors.values())
    if not total:
        return
    worst, count = found.errors.most_common(1)[0]
    every = not found.seconds or count >= 0.9 * len(found.seconds)
    if "took longer than" in worst:
        what = f"The reward did not answer within {timeout_s:g} s in {count} calls; they would score "
        what += "reward.failure_score."
        yield Finding(ERROR if every else WARNING, AREA, what, where, "raise reward.timeout_s, or make it faster")
        return
    forms = list(found.failed_forms)
    on = f", all with an {forms[0]}" if forms == ["empty response"] else ""
    what = f"The reward failed in {total} calls on real rows{on}, most often with: {worst}"
    yield Finding(ERROR if every else WARNING, AREA, what, where, "mend it: a failure scores reward.failure_score")


def _judgement(found: Findings, where: str) -> Iterator[Finding]:
    """Whether right answers score high and wrong ones low."""
    if not found.told_apart:
        return
    above, below = sum(gap > 0 for gap in found.told_apart), sum(gap < 0 for gap in found.told_apart)
    if above >= 0.5 * len(found.told_apart):
        return
    best = sum(found.best) / len(found.best)
    rows = len(found.told_apart)
    if below > above:
        what = f"A wrong answer scores above the right one in {below} of {rows} rows (the truth of another row as the "
        what += "response): right and wrong seem exchanged."
        yield Finding(ERROR, AREA, what, where, "look at the comparison, and at the sign of the score")
    elif max(found.best) <= 0:
        what = (
            f"No truth scores above 0 against itself, in any usual spelling ({rows} rows): no response could be right."
        )
        do = "bring truths and reward into one form; `posttrain reward try` shows the scores by form"
        yield Finding(ERROR, AREA, what, where, do)
    else:
        what = f"Wrong answers score as much as right ones in {rows - above} of {rows} rows (both {best:g} on average)."
        yield Finding(ERROR, AREA, what, where, "let the reward compare the response with ground_truth")


def _marks(found: Findings, where: str, items: Sequence[Any]) -> Iterator[Finding]:
    """A form that the reward wants and no prompt asks for."""
    means = {form: sum(scores) / len(scores) for form, scores in found.by_form.items()}
    bare = means.get("truth, bare")
    if bare is None:
        return
    wanted = {name: means[f"truth, {name}"] for name in MARKS if means.get(f"truth, {name}", bare) > bare + 0.5}
    if not wanted or any(MARKS[name] in str(item["prompt"]) for item in items for name in wanted):
        return
    forms = " or ".join(wanted)
    what = f"The reward counts an answer as {forms} ({max(wanted.values()):g}) and not the bare one ({bare:g}), but no "
    what += "prompt asks for that form: at the start nearly all responses would score low."
    do = "ask for it in the prompts (or in data.system_prompt), or let the reward take the bare answer too"
    yield Finding(WARNING, AREA, what, where, do)


def _slow(case: Case, found: Findings, where: str) -> Iterator[Finding]:
    mean = sum(found.seconds) / len(found.seconds)
    calls = case.config.data.train_batch_size * case.config.actor_rollout_ref.rollout.n
    workers = case.config.reward.num_workers or 8
    what = f"A call of the reward takes {mean:.2g} s: the {calls} responses of a step would take at least "
    what += f"{mean * calls / workers:.0f} s with {workers} workers."
    yield Finding(WARNING, AREA, what, where, "raise reward.num_workers, or make it faster")
