"""What `posttrain reward try` found: the numbers, the problems, and both as a page of text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.rewards.scorers import known_sources
from posttrain.rewards.types import RewardSpec

# Uninformed responses: no word, the right answer among wrong ones, and the question itself.
EMPTY, LISTED, REPEATED = "empty response", "many answers listed", "the question repeated"
# Form -> (share of rows above which it is no coincidence that it scores like the ground truth, what it does in words).
UNEARNED = {LISTED: (0.5, "lists many answers, one of them right,"), REPEATED: (0.25, "only repeats the question")}
WHOSE = ("reference", "another row's", "responses")  # reference answers of the rows; of other rows
# Examples shown of each problem.
EXAMPLES = 3
LEAST_SIGNAL = 0.3
# How many reasons are shown why programs failed.
FAILURES = 10


@dataclass
class Findings:
    """The result of a try: problems to look at before a run, and the numbers behind them."""

    rows: int = 0
    # Whether a built-in scorer is asked, which compares responses with ground truths.
    needs_truths: bool = False
    # Rows without a ground truth, and whether some of them have a column `answer` instead.
    truthless: int = 0
    has_answers: bool = False
    # Data sources without a scorer, and how many rows have them.
    unmatched: Counter[str] = field(default_factory=Counter)
    # Ground truths that were scored and do not score 1 against themselves: row, ground truth, best score.
    unscored: list[tuple[int, str, float]] = field(default_factory=list)
    by_form: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    best: list[float] = field(default_factory=list)
    responses: list[float] = field(default_factory=list)
    # Responses from which no answer was extracted: row, response.
    unanswered: list[tuple[int, str]] = field(default_factory=list)
    # Part -> one of WHOSE -> values.
    parts: dict[str, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    # For responses sampled together: score, and whether the reward counts it as right.
    groups: dict[Any, list[tuple[float, bool]]] = field(default_factory=lambda: defaultdict(list))
    # The model that the responses were sampled from.
    model: str = ""
    # (whether the reward counts the response as right, whether its answer is the ground truth) -> how many.
    agrees: Counter[tuple[bool, bool]] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    # Forms of the response on which the reward failed.
    failed_forms: Counter[str] = field(default_factory=Counter)
    # Rows for which no spelling of the ground truth could be scored.
    failed_rows: int = 0
    # Why programs failed their tests, if the scorer reports it; not a problem by itself.
    failures: Counter[str] = field(default_factory=Counter)
    prints: list[str] = field(default_factory=list)
    # The time of each call that returned.
    seconds: list[float] = field(default_factory=list)
    # Responses with another score the second time: row, form, both scores.
    flaky: list[tuple[int, str, float, float]] = field(default_factory=list)
    # Per row: the best score of the ground truth minus the best of another row's ground truth.
    score_gaps: list[float] = field(default_factory=list)

    # Form of an uninformed response -> per row, whether it scores as much as the ground truth.
    unearned: dict[str, list[bool]] = field(default_factory=lambda: defaultdict(list))

    @property
    def ok(self) -> bool:
        """Whether nothing was found that would spoil a run."""
        found = self.unmatched or self.unscored or self.errors or self.flaky or (self.needs_truths and self.truthless)
        return not (found or self.ignores_answers or self.lacks_signal or self.lacks_answers or self.loopholes())

    def loopholes(self) -> list[str]:
        # A reward that ignores answers pays everything, so loopholes are only listed for others.
        if self.ignores_answers:
            return []
        return [
            f"A response that {UNEARNED[form][1]} scores as much as the right answer in {sum(paid)} of {len(paid)} rows"
            for form, paid in self.unearned.items()
            if paid and sum(paid) > UNEARNED[form][0] * len(paid)
        ]

    @property
    def lacks_answers(self) -> bool:
        """Whether answers are missing; a sampling model may miss one in ten."""
        return len(self.unanswered) > (0.1 * len(self.responses) if self.groups else 0)

    @property
    def ignores_answers(self) -> bool:
        """Whether right and wrong answers score alike (or the wrong ones higher) in most rows."""
        return sum(gap > 0 for gap in self.score_gaps) < len(self.score_gaps) / 2

    @property
    def signal(self) -> float | None:
        """The share of groups whose scores differ; the others would teach nothing."""
        several = [group for group in self.groups.values() if len(group) > 1]
        return sum(len({score for score, _ in group}) > 1 for group in several) / len(several) if several else None

    @property
    def lacks_signal(self) -> bool:
        """Whether most groups would teach nothing (a run's diagnosis uses the same threshold)."""
        return self.signal is not None and self.signal < LEAST_SIGNAL


def report(found: Findings, spec: RewardSpec) -> str:
    lines = [f"reward: {spec.label}", f"rows:   {found.rows}"]
    lines += _sources(found) + _truthless(found)
    if found.best:
        lines += ["", "reference answers scored against themselves (best spelling): " + distribution(found.best)]
        if found.failed_rows:
            lines.append(
                f"! {found.failed_rows} of {len(found.best)} reference answers were not scored: every call failed, "
                "with the errors below"
            )
        if found.unscored:
            lines.append(
                f"! {len(found.unscored)} of {len(found.best)} reference answers do not score 1 against themselves, "
                "for example:"
            )
            lines += [
                f"    row {row}: {_short(truth)} scores {score:g}" for row, truth, score in found.unscored[:EXAMPLES]
            ]
            lines.append(
                "    so no response can earn their full reward: write the reference answers as the reward reads them"
            )
    if found.by_form:
        lines += ["", "mean score by form of the response:"]
        lines += [f"    {form:<40} {_mean(scores):>8.3f}" for form, scores in found.by_form.items()]
    if found.best:
        lines += _agreement(found)
        lines += [f"! {words}: a model would learn that instead of the task" for words in found.loopholes()]
    lines += ["", *_response_lines(found)]
    lines += _part_lines(found)
    if found.failures:
        lines += ["programs failed because of:"]
        lines += [f"    {count:>4} x {failure}" for failure, count in found.failures.most_common(FAILURES)]
    for error, count in found.errors.most_common(EXAMPLES):
        lines += [f"! {count} call{'s' * (count != 1)} failed: " + error.replace("\n", "\n    ")]
    for row, form, first, second in found.flaky[:EXAMPLES]:
        lines.append(f"! row {row}, {form}: scored {first:g}, and {second:g} when asked again")
    if found.flaky:
        lines.append(f"    {len(found.flaky)} scores of the same response differ: a run could not be repeated")
    if found.seconds:
        lines.append(timing(found.seconds))
    lines += [f"printed: {line}" for line in found.prints[:EXAMPLES]]
    lines.append("nothing suspicious found" if found.ok else "look at the lines marked `!` before you train")
    return "\n".join(lines)


def _sources(found: Findings) -> list[str]:
    lines = []
    for source, count in found.unmatched.most_common():
        what = (
            f"{_rows(count)} data_source {source!r}, which has no scorer"
            if source
            else f"{_rows(count)} no data_source"
        )
        lines.append(f"! {what} (known: {', '.join(known_sources())})")
    if found.unmatched:
        lines.append("    set the column data_source to one of these, or give a reward function of your own (FN)")
    return lines


def _truthless(found: Findings) -> list[str]:
    if not found.truthless:
        return []
    mark = "! " if found.needs_truths else ""
    lines = [f"{mark}{_rows(found.truthless)} no reference answer (column ground_truth): the reward gets None"]
    if found.needs_truths:
        rename = "rename their column `answer` to ground_truth" if found.has_answers else "add the column ground_truth"
        lines.append(f"    {rename}; the built-in scorers compare responses with it")
    return lines


def _rows(count: int) -> str:
    return f"{count} row has" if count == 1 else f"{count} rows have"


def timing(seconds: Sequence[float]) -> str:
    ordered, mean = sorted(seconds), _mean(seconds)
    late = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return (
        f"time of a call: {_span(mean)} on average, {_span(late)} for the slowest hundredth, {_span(ordered[-1])} at "
        f"most; one worker makes {1 / max(mean, 1e-9):,.0f} a second"
    )


def _span(seconds: float) -> str:
    amount, unit = (seconds, "s") if seconds >= 1 else (1000 * seconds, "ms")
    return f"{amount:.0f} {unit}" if amount >= 99 else f"{amount:.2g} {unit}"  # .2g would write 360 as 3.6e+02


def _agreement(found: Findings) -> list[str]:
    if not found.score_gaps:
        return []
    above = sum(gap > 0 for gap in found.score_gaps)
    below = sum(gap < 0 for gap in found.score_gaps)
    mark = "! " if found.ignores_answers else ""
    text = f"{mark}the reference answer scores above another row's in {above} of {len(found.score_gaps)} rows"
    return [text + (f", and below it in {below}" if below else "")]


def distribution(scores: Sequence[float]) -> str:
    """Return `mean 0.900, min 0, max 1; 1: 90, 0: 10` (the eight most frequent values)."""
    counts = Counter(round(score, 4) for score in scores).most_common()
    shown = ", ".join(f"{score:g}: {count}" for score, count in counts[:8]) + (", ..." if len(counts) > 8 else "")
    return f"mean {_mean(scores):.3f}, min {min(scores):g}, max {max(scores):g}; {shown}"


def _part_lines(found: Findings) -> list[str]:
    if not found.parts:
        return []
    whose = [one for one in WHOSE if any(values[one] for values in found.parts.values())]
    width = max(12, *map(len, whose))
    lines = ["mean by part:" + " " * 25 + "".join(f" {one:>{width}}" for one in whose)]
    for name, values in found.parts.items():
        means = "".join(f" {_mean(values[one]) if values[one] else float('nan'):>{width}.3f}" for one in whose)
        lines.append(f"    {name:<34}{means}".replace("nan", "  -"))
    for name, values in found.parts.items():
        if values["responses"]:
            lines.append(f"    {name} of responses: {distribution(values['responses'])}")
    return lines


def _group_lines(found: Findings) -> list[str]:
    if found.signal is None:
        return []
    groups = [group for group in found.groups.values() if len(group) > 1]
    right = sum(all(is_right for _, is_right in group) for group in groups)
    wrong = sum(not any(is_right for _, is_right in group) for group in groups)
    mark, with_signal = "! " if found.lacks_signal else "", round(found.signal * len(groups))
    lines = [
        f"{mark}groups that would carry signal: {with_signal} of {len(groups)} ({found.signal:.0%}); all right "
        f"{right}, all wrong {wrong}"
    ]
    if found.lacks_signal:
        cause = "harder prompts" if right > wrong else "easier prompts, a model that was fine-tuned on the task first"
        lines.append(f"    the others have equal scores and teach nothing: take {cause}, a finer reward or a larger -k")
    return lines


def _agreement_of_responses(found: Findings) -> list[str]:
    if not found.agrees:
        return []
    total, same = sum(found.agrees.values()), found.agrees[True, True] + found.agrees[False, False]
    text = f"the reward agrees with the ground truth on {same} of {total} answers that can be read ({same / total:.0%})"
    generous, strict = found.agrees[True, False], found.agrees[False, True]
    wrong = f"; it counts {generous} wrong answers as right, and {strict} right answers as wrong"
    return [text + (wrong if same < total else "")]


def _response_lines(found: Findings) -> list[str]:
    if not found.responses:
        return ["responses: none given (--model M samples some, --responses FILE takes those of a run)"]
    whose = f" of {found.model}" if found.model else ""
    lines = [f"responses: {len(found.responses)}{whose}, " + distribution(found.responses)]
    lines += _group_lines(found) + _agreement_of_responses(found)
    if found.unanswered:
        mark, count = "! " if found.lacks_answers else "", len(found.unanswered)
        lines.append(f"{mark}{count} of {len(found.responses)} responses gave no extracted answer, for example:")
        lines += [f"    row {row}: {_short(response)}" for row, response in found.unanswered[:EXAMPLES]]
    return lines


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return repr(flat if len(flat) <= 80 else "..." + flat[-77:])
