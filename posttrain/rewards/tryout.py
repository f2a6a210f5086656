"""`posttrain reward try`: scores a data file with a reward, before a run spends time on it.

Every row's ground truth is scored as if it were the response, in the usual spellings (bare, `\\boxed{}`, `#### `,
`<answer>`), and so are the ground truth of another row and an empty response. If the ground truth is a whole solution,
its final answer is scored too. Two uninformed responses are added: many answers in a row, and the question repeated.
Given responses are scored as well.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

from posttrain.rewards.answers import explicit_answer, extract_final_answer, is_prose, parse_number, read_answer
from posttrain.rewards.combined import asks_sources, named_sources
from posttrain.rewards.loading import check_columns
from posttrain.rewards.pool import RewardPool
from posttrain.rewards.scorers import NO_SCORER, find_scorer, is_code
from posttrain.rewards.try_report import EMPTY, LISTED, REPEATED, Findings, report
from posttrain.rewards.types import RewardError, RewardItem, RewardResult, RewardSpec

# How a right response may spell the ground truth; one of these must score 1.
SPELLINGS: dict[str, Callable[[str], str]] = {
    "bare": lambda truth: truth,
    "\\boxed{}": lambda truth: f"\\boxed{{{truth}}}",
    "####": lambda truth: f"#### {truth}",
    "<answer>": lambda truth: f"<answer>{truth}</answer>",
}

# What is spelled: the ground truth as it is, and the final answer if it is a whole solution (`... #### 72`).
TRUTH, ANSWER = "reference answer", "its final answer"
LISTED_ON_EACH_SIDE = 4

# Columns (or keys of extra_info) in which data sets of coding tasks keep a program that passes.
SOLUTIONS = ("canonical_solution", "solution", "code", "reference_solution")


def try_reward(rows: Sequence[dict[str, Any]], spec: RewardSpec | None = None, **options: Any) -> str:
    """Return the report of `examine` as text."""
    spec = spec or RewardSpec()
    return report(examine(rows, spec, **options), spec)


def examine(
    rows: Sequence[dict[str, Any]],
    spec: RewardSpec,
    *,
    responses: Sequence[dict[str, Any]] | None = None,
    default_source: str | None = None,
    num_workers: int | None = None,
    timeout_s: float = 10.0,
    times: int = 2,
    patience_s: float | None = None,
) -> Findings:
    """Score ground truths, wrong answers and responses (those given, else the rows' own column `response`).

    Everything is scored `times` times, and differing scores are reported. `patience_s` limits the number of rows, by
    the time of a first call. Responses with the same `group` are scored together.
    """
    rows = [as_trained(row) for row in rows]
    check_columns(spec, {name for row in rows for name in extra_info_of(row) or ()})
    found = Findings(rows=len(rows), needs_truths=_asks_scorers(spec))
    with RewardPool(
        spec, num_workers=num_workers, timeout_s=timeout_s, failure_score=0.0, on_print=found.prints.append
    ) as pool:
        usable = [(i, row) for i, row in enumerate(rows) if _match_source(row, spec, default_source, found)]
        if patience_s is not None and usable:
            usable = _affordable(pool, usable, default_source, patience_s, found)
        if responses is None:
            responses = [row for row in rows if row.get("response") is not None]
        scored = [(i, row) for i, row in enumerate(responses) if _match_source(row, spec, default_source, None)]
        asked = _items_of_truths(usable, spec, default_source) | _items_of_responses(scored, default_source)
        pool.submit_many(list(asked.items()))
        results = pool.wait_all()
        found.seconds = [result.seconds for result in results.values() if result.seconds is not None]
        for _ in range(0 if _hopeless(results) else times - 1):
            # In another order, to find scores that depend on earlier ones.
            pool.submit_many(list(reversed(asked.items())))
            _note_flaky(found, results, pool.wait_all())
    if times > 1 and asked and not (found.flaky or _hopeless(results)):
        # Workers seed random numbers by the response, which hides that a reward draws some. Another seed shows it.
        with RewardPool(replace(spec, seed=1), num_workers=num_workers, timeout_s=timeout_s, on_print=_ignore) as pool:
            pool.submit_many(list(asked.items()))
            _note_flaky(found, results, pool.wait_all())
    by_row: dict[int, dict[str, RewardResult]] = defaultdict(dict)
    for key, result in results.items():
        i, form = cast(tuple[int, str], key)
        by_row[i][form] = result
    for i, row in usable:
        if _is_code(row, default_source):
            _note_task(found, i, row, by_row[i])
        elif _tried_truth(row, spec) is None:
            _note_truthless(found, row, by_row[i])
        else:
            _note_truth(found, i, row, by_row[i])
    for i, row in scored:
        _note_response(found, i, row, results[i, "response"])
    return found


def _items_of_truths(
    usable: Sequence[tuple[int, dict[str, Any]]], spec: RewardSpec, default_source: str | None
) -> dict[Any, RewardItem]:
    """(row, form) -> the ground truth in that form, or a wrong answer."""
    asked: dict[Any, RewardItem] = {}
    for place, (i, row) in enumerate(usable):
        following = [usable[(place + step) % len(usable)][1] for step in range(1, len(usable))]
        others = [truth for truth in (_tried_truth(one, spec) for one in following) if truth is not None]
        trials = _code_trials(row) if _is_code(row, default_source) else _trials(row, _tried_truth(row, spec), others)
        asked |= {(i, form): _item(row, text, default_source) for form, text in trials}
    return asked


def _items_of_responses(
    scored: Sequence[tuple[int, dict[str, Any]]], default_source: str | None
) -> dict[Any, RewardItem]:
    """(number of the response, "response") -> the response, with its group."""
    asked: dict[Any, RewardItem] = {}
    sizes = Counter(row[GROUP] for _, row in scored if GROUP in row)
    for i, row in scored:
        asked[i, "response"] = item = _item(row, str(row["response"]), default_source)
        if GROUP in row:
            item.group, item.group_size = row[GROUP], sizes[row[GROUP]]
    return asked


def _ignore(line: str) -> None:
    """What a reward prints the second time was already shown."""


def _affordable(
    pool: RewardPool, usable: list[Any], default_source: str | None, patience_s: float, found: Findings
) -> list[Any]:
    # As many rows as fit into `patience_s`; none if the first call did not return.
    row = usable[0][1]
    truth = truth_of(row)
    text = "" if truth is None or _is_code(row, default_source) else _one(truth)
    pool.submit("first", _item(row, text, default_source))
    first = pool.wait_all()["first"]
    if first.seconds is None:
        found.errors[_failure(row, str(first.error))] += 1
        return []
    calls = 3 * len([*_trials(row, truth, [""])])
    return usable[: max(2, int(patience_s / max(first.seconds * calls, 1e-9)))]


def _hopeless(results: dict[Any, RewardResult]) -> bool:
    # If every call failed, trying again shows nothing new, and each deadline costs its seconds.
    return all(result.error for result in results.values())


def _note_flaky(found: Findings, first: dict[Any, RewardResult], second: dict[Any, RewardResult]) -> None:
    known = {(row, form) for row, form, *_ in found.flaky}
    for (row, form), result in first.items():
        other = second[row, form]
        if (row, form) not in known and (result.score, bool(result.error)) != (other.score, bool(other.error)):
            found.flaky.append((row, form, result.score, other.score))


# The key by which responses to the same prompt belong together.
GROUP = "group"


def truth_of(row: dict[str, Any]) -> Any:
    """Return a row's ground truth: `ground_truth`, `reward_model.ground_truth` or `answer`."""
    truth = _given_truth(row)
    return row.get("answer") if truth is None else truth


def _given_truth(row: dict[str, Any]) -> Any:
    # What a run gives to rewards as ground truth; None if the row has none.
    if row.get("ground_truth") is not None:
        return row["ground_truth"]
    nested = row.get("reward_model")
    return nested.get("ground_truth") if isinstance(nested, dict) else None


def _tried_truth(row: dict[str, Any], spec: RewardSpec) -> Any:
    # A user's function may read the right answer from the column `answer`; built-in scorers do not.
    return _given_truth(row) if _asks_scorers(spec) else truth_of(row)


def _asks_scorers(spec: RewardSpec) -> bool:
    return asks_sources(spec) or bool(named_sources(spec))


def as_trained(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as training reads it: without another ground truth, the column `response` is the ground truth."""
    if _given_truth(row) is not None or row.get("response") is None:
        return row
    return {**row, "ground_truth": row["response"], "response": None}


def _match_source(row: dict[str, Any], spec: RewardSpec, default_source: str | None, found: Findings | None) -> bool:
    # A user's own function is assumed to handle all sources.
    if not asks_sources(spec):
        return True
    source = _source(row, default_source)
    try:
        find_scorer(source)
    except RewardError:
        if found is not None:
            found.unmatched[source] += 1
        return False
    return True


def _source(row: dict[str, Any], default_source: str | None) -> str:
    return str(row.get("data_source") or default_source or "")


def _item(row: dict[str, Any], text: str, default_source: str | None) -> RewardItem:
    source, truth = _source(row, default_source), _given_truth(row)
    item = RewardItem(source, text, truth, extra_info_of(row), prompt=row.get("prompt"))
    if text == row.get("response"):
        item.own_words = row.get("own_words")
    return item


def extra_info_of(row: dict[str, Any]) -> Any:
    """Return what training passes to rewards as `extra_info`: other columns, under the row's own `extra_info`."""
    taken = ("prompt", "ground_truth", "data_source", "extra_info", "response", "own_words", GROUP)
    others = {name: value for name, value in row.items() if name not in taken and value is not None}
    own = row.get("extra_info")
    if own is not None and not isinstance(own, dict):
        own = {"extra_info": own}
    return {**others, **(own or {})} or None


def _trials(row: dict[str, Any], truth: Any, others: Sequence[Any]) -> Iterable[tuple[str, str]]:
    # (form, response) of all that is scored for a row; `others` are the ground truths of the rows after it.
    if truth is not None:
        yield from _answers(_one(truth), others)
    yield EMPTY, ""
    if truth is not None:
        yield from _lists(_short(_one(truth)), others)
    if (question := _question(row)) is not None:
        yield REPEATED, question


def _answers(truth: str, others: Sequence[Any]) -> Iterable[tuple[str, str]]:
    own, other = _short(truth), _one(others[0]) if others else truth
    is_wrong = _short(other) != own  # two solutions may end with the same answer
    for what, right, wrong in ((TRUTH, truth, other), (ANSWER, _answer_in(truth), _answer_in(other))):
        for name, spell in SPELLINGS.items():
            if right is not None:
                yield f"{what}, {name}", spell(right)
            if wrong is not None and is_wrong:
                yield f"another row's {what.removeprefix('its ')}, {name}", spell(wrong)


def _lists(own: str, others: Sequence[Any]) -> Iterable[tuple[str, str]]:
    strange = [answer for answer in dict.fromkeys(_short(_one(one)) for one in others) if own not in answer]
    if strange:
        before = strange[1 : 1 + LISTED_ON_EACH_SIDE] or strange
        after = strange[1 + LISTED_ON_EACH_SIDE : 2 * LISTED_ON_EACH_SIDE]
        yield LISTED, ", ".join([*before, own, *after, strange[0]])


def _answer_in(truth: str) -> str | None:
    # The final answer of a whole solution; None if the ground truth is the answer itself.
    answer = explicit_answer(truth) or (extract_final_answer(truth) if is_prose(truth) else None)
    return answer if answer != truth.strip() else None


def _short(truth: str) -> str:
    return _answer_in(truth) or truth


def _question(row: dict[str, Any]) -> str | None:
    prompt = row.get("prompt")
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[-1], dict):
        prompt = prompt[-1].get("content")
    return prompt if isinstance(prompt, str) and prompt.strip() else None


def _is_code(row: dict[str, Any], default_source: str | None) -> bool:
    return is_code(_source(row, default_source))


def _code_trials(row: dict[str, Any]) -> Iterable[tuple[str, str]]:
    # Tests are no response. If the row has a solution, it must pass them.
    extra = row.get("extra_info")
    places = (row, extra if isinstance(extra, dict) else {})
    solutions = (place.get(name) for place in places for name in SOLUTIONS)
    given = next((text for text in solutions if isinstance(text, str) and text.strip()), None)
    if given is not None:
        yield "solution", given
    yield EMPTY, ""


def _one(truth: Any) -> str:
    truth = truth.tolist() if hasattr(truth, "tolist") else truth
    return str(truth[0]) if isinstance(truth, list | tuple) and truth else str(truth)


def _note_truth(found: Findings, i: int, row: dict[str, Any], scored: dict[str, RewardResult]) -> None:
    of_row = {form: result for form, result in scored.items() if form != "response"}
    tried = [result for form, result in of_row.items() if form.startswith((f"{TRUTH}, ", f"{ANSWER}, "))]
    if all(NO_SCORER in (result.error or "") for result in tried):
        found.unmatched[str(row.get("data_source"))] += 1  # a user's function that calls our scorers by data source
        return
    _note_forms(found, row, of_row)
    has_failed = all(result.error for result in tried)
    found.failed_rows += has_failed
    best = max(result.score for result in tried)
    _note_parts(found, "reference", max(tried, key=lambda result: result.score))
    others = [result for form, result in of_row.items() if form.startswith("another row's ")]
    if others:
        _note_parts(found, "another row's", max(others, key=lambda result: result.score))
        found.score_gaps.append(best - max(result.score for result in others))
    found.best.append(best)
    if best > of_row[EMPTY].score:
        for form in (LISTED, REPEATED):
            if form in of_row:
                found.unearned[form].append(not of_row[form].error and of_row[form].score >= best)
    # If a reward reports `acc`, its score may be anything: weights, bonuses.
    if not has_failed and max(float(result.parts.get("acc", result.score)) for result in tried) < 1.0:
        found.unscored.append((i, _one(truth_of(row)), best))


def _note_truthless(found: Findings, row: dict[str, Any], scored: dict[str, RewardResult]) -> None:
    _note_forms(found, row, {form: result for form, result in scored.items() if form != "response"})
    found.truthless += 1
    found.has_answers |= row.get("answer") is not None


def _note_forms(found: Findings, row: dict[str, Any], scored: dict[str, RewardResult]) -> None:
    for form, result in scored.items():
        found.by_form[form].append(result.score)
        if result.error:
            found.errors[_failure(row, result.error)] += 1
            found.failed_forms[form] += 1


def _note_task(found: Findings, i: int, row: dict[str, Any], scored: dict[str, RewardResult]) -> None:
    for form in ("solution", EMPTY):
        result = scored.get(form)
        if result is None:
            continue
        found.by_form[form].append(result.score)
        if result.error:
            found.errors[_failure(row, result.error)] += 1
        elif form == "solution" and result.score < 1.0:
            found.failures[str(result.parts.get("failure"))] += 1
        if form == "solution":
            found.best.append(result.score)
            if result.score < 1.0:
                found.unscored.append((i, "its solution", result.score))


def _note_response(found: Findings, i: int, row: dict[str, Any], result: RewardResult) -> None:
    found.responses.append(result.score)
    if result.error:
        found.errors[_failure(row, result.error)] += 1
    _note_parts(found, "responses", result)
    if result.parts.get("failure"):
        found.failures[str(result.parts["failure"])] += 1
    response, is_right = str(row["response"]), _is_right(result)
    if GROUP in row:
        found.groups[row[GROUP]].append((result.score, is_right))
    # If the function reports what it read, that counts; otherwise our own extraction is used.
    pred = result.parts["pred"] if "pred" in result.parts else read_answer(_source(row, None), response)
    if pred == "" or pred is None:
        found.unanswered.append((i, response))
    elif not result.error and not _is_code(row, None):
        found.agrees[is_right, _matches_truth(str(pred), truth_of(row))] += 1


def _note_parts(found: Findings, whose: str, result: RewardResult) -> None:
    for name, value in result.parts.items():
        if not isinstance(value, str):
            found.parts[name][whose].append(value)


def _is_right(result: RewardResult) -> bool:
    # By its part `acc`, else by its score, as in a run's metrics.
    return float(result.parts.get("acc", result.score)) >= 0.5


def _matches_truth(answer: str, truth: Any) -> bool:
    # As texts or as numbers; the ground truth may be a list of several.
    truths = truth if isinstance(truth, list | tuple) else [truth]
    wanted = [text for one in truths for text in (str(one), extract_final_answer(str(one))) if text]
    if any(answer.strip() == text.strip() for text in wanted):
        return True
    number = parse_number(answer)
    return number is not None and any(number == parse_number(text) for text in wanted)


def _failure(row: dict[str, Any], error: str) -> str:
    return f"data_source {row['data_source']!r}: {error}" if row.get("data_source") else error
