"""The reward on real rows: right answers score above wrong ones, reproducibly, in time, without exceptions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from posttrain.doctor.case import ERROR, NOTE, WARNING, Case, Finding
from posttrain.errors import UserError
from posttrain.rewards.combined import asks_sources, named_sources
from posttrain.rewards.loading import resolve_reward
from posttrain.rewards.pool import pool_size
from posttrain.rewards.scorers import check_sources
from posttrain.rewards.scorers.code import check_programs, code_settings
from posttrain.rewards.try_report import EMPTY, Findings, timing
from posttrain.rewards.tryout import ANSWER, TRUTH, examine
from posttrain.rewards.types import RewardSpec

AREA = "reward"
ROWS = 24  # rows that are tried; each is asked about a dozen times
PATIENCE_S = 20.0
SLOW_STEP_S = 30.0  # seconds of scoring in a step from which it is worth a look
# A reward is pure chance if more than RANDOM of the responses score differently the second time, and fewer than
# TOLD_APART of the rows have the right answer above a wrong one (dice reach that for 24 rows once in a hundred times).
RANDOM, TOLD_APART = 0.25, 0.75
# Spelling of `posttrain reward try` -> text in prompts that ask for it.
MARKS = {"\\boxed{}": "boxed", "####": "####", "<answer>": "<answer>"}


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
    yield from _try_reward(
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


def _try_reward(case: Case, spec: RewardSpec, items: Sequence[Any]) -> Iterator[Finding]:
    limits, where = case.config.reward, spec.label
    columns = {"data_source": "data_source", "ground_truth": "ground_truth", "extra_info": "extra_info"}
    columns["prompt"] = "raw_prompt"
    rows = [{name: item[column] for name, column in columns.items()} for item in items]
    how: dict[str, Any] = {"default_source": case.config.data.data_source, "timeout_s": limits.timeout_s}
    how["num_workers"] = limits.num_workers or 1
    try:
        found = examine(rows, spec, patience_s=PATIENCE_S, **how)
    except UserError as error:
        yield Finding(ERROR, AREA, str(error), where)
        return
    if found.seconds:
        case.report.fact(AREA, f"{where}; {timing(found.seconds)}.")
        case.reward_s = sum(found.seconds) / len(found.seconds)
    yield from _failures(found, where, limits.timeout_s)
    if found.best and not found.errors:
        best = sum(found.best) / len(found.best)
        higher = sum(gap > 0 for gap in found.score_gaps)
        case.report.fact(
            AREA,
            f"{len(found.best)} rows tried: reference answers score {best:.3g} on average; in {higher} of "
            f"{len(found.score_gaps)} rows the reference answer scores above another row's.",
        )
    if found.flaky:
        yield _random(found, where)
    elif found.best and not found.errors:
        yield from _judgement(found, where)
        yield from _marks(found, where, items)
        yield from _loopholes(found, where)
    if case.reward_s:
        yield from _pace(case, where)


def _random(found: Findings, where: str) -> Finding:
    # Its scores of right and wrong answers are chance, so no other finding is reported.
    row, form, first, second = found.flaky[0]
    asked = sum(len(scores) for scores in found.by_form.values())
    above = sum(gap > 0 for gap in found.score_gaps)
    what = f"The reward is random: the same response scores {first:g} at first and {second:g} when it is scored again "
    what += f"(row {row}, {form}; so do {len(found.flaky)} of {asked} responses)."
    level = WARNING
    if len(found.flaky) > RANDOM * asked and above < TOLD_APART * len(found.score_gaps):
        level = ERROR
        what += f" Right answers score above wrong ones in {above} of {len(found.score_gaps)} rows: nothing to learn."
    do = "let it depend on its arguments alone (no random numbers, no clock, no state that calls share)"
    return Finding(level, AREA, what, where, do)


def _failures(found: Findings, where: str, timeout_s: float) -> Iterator[Finding]:
    total = sum(found.errors.values())
    if not total:
        return
    worst, count = found.errors.most_common(1)[0]
    every = not found.seconds or found.failed_rows >= 0.9 * max(1, len(found.best))
    if "took longer than" in worst:
        what = f"The reward did not answer within {timeout_s:g} s in {count} calls; they would score "
        what += "reward.failure_score."
        yield Finding(ERROR if every else WARNING, AREA, what, where, "raise reward.timeout_s, or make it faster")
        return
    forms = list(found.failed_forms)
    on = f", all with an {EMPTY}" if forms == [EMPTY] else ""
    on += ", on every row" if found.failed_rows and found.failed_rows == len(found.best) else ""
    what = f"The reward failed in {total} calls on real rows{on}, most often with: {worst}"
    yield Finding(ERROR if every else WARNING, AREA, what, where, "fix it: a failure scores reward.failure_score")


def _judgement(found: Findings, where: str) -> Iterator[Finding]:
    if not found.score_gaps:
        return
    above, below = sum(gap > 0 for gap in found.score_gaps), sum(gap < 0 for gap in found.score_gaps)
    if above >= 0.5 * len(found.score_gaps):
        return
    best = sum(found.best) / len(found.best)
    rows = len(found.score_gaps)
    if below > above:
        what = f"A wrong answer (the reference answer of another row) scores above the right one in {below} of {rows} "
        what += "rows: right and wrong seem exchanged."
        yield Finding(ERROR, AREA, what, where, "look at the comparison, and at the sign of the score")
    elif max(found.best) <= 0:
        what = (
            f"No reference answer scores above 0 against itself, in any usual spelling ({rows} rows): no response "
            "could be right."
        )
        do = "write reference answers as the reward reads them; `posttrain reward try` shows the scores by form"
        yield Finding(ERROR, AREA, what, where, do)
    else:
        what = f"Wrong answers score as much as right ones in {rows - above} of {rows} rows (both {best:g} on average)."
        yield Finding(ERROR, AREA, what, where, "let the reward compare the response with ground_truth")


def _loopholes(found: Findings, where: str) -> Iterator[Finding]:
    # Responses without knowledge that score as high as the right answer.
    for words in found.loopholes():
        what = f"{words}: a model would learn that instead of the task."
        do = "let the reward read one answer (the last number, what stands in \\boxed{}) and compare that alone, "
        do += "instead of looking for ground_truth anywhere in the response"
        yield Finding(WARNING, AREA, what, where, do)


def _marks(found: Findings, where: str, items: Sequence[Any]) -> Iterator[Finding]:
    # By spelling: of the truth or, if that scores higher, of the answer at its end.
    means: dict[str, float] = {}
    for form, scores in found.by_form.items():
        whose, _, name = form.partition(", ")
        if whose in (TRUTH, ANSWER):
            means[name] = max(means.get(name, -math.inf), sum(scores) / len(scores))
    bare = means.get("bare")
    if bare is None:
        return
    wanted = {name: means[name] for name in MARKS if means.get(name, bare) > bare + 0.5}
    if not wanted or any(MARKS[name] in str(item["prompt"]) for item in items for name in wanted):
        return
    forms = " or ".join(wanted)
    what = f"The reward counts an answer as {forms} ({max(wanted.values()):g}) and not the bare one ({bare:g}), but no "
    what += "prompt asks for that form: at the start nearly all responses would score low."
    do = "ask for it in the prompts (or in data.system_prompt), or let the reward take the bare answer too"
    yield Finding(WARNING, AREA, what, where, do)


def _pace(case: Case, where: str) -> Iterator[Finding]:
    seconds, workers = case.scoring_s, pool_size(case.config.reward.num_workers)
    words = f"The {case.responses} responses of a step would be scored in about {seconds:.2g} s by {workers} "
    words += f"worker{'s' * (workers != 1)}"
    case.report.fact(AREA, f"{words}, while others are generated.")
    if seconds > SLOW_STEP_S:
        what = f"A call of the reward takes {case.reward_s:.2g} s. {words}."
        do = f"raise reward.num_workers (it is {workers}), or make it faster"
        yield Finding(WARNING, AREA, what, where, do)
