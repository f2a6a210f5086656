"""What `posttrain reward try` found: the numbers, the problems among them, and both as a page of text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.rewards.scorers import known_sources
from posttrain.rewards.types import RewardSpec

EMPTY, LISTED, REPEATED = "empty response", "many answers listed", "the question repeated"
"""Responses that know nothing: no word, the right answer among wrong ones, and what was asked."""
UNEARNED = {LISTED: (0.5, "lists many answers, one of them right,"), REPEATED: (0.25, "only repeats the question")}
"""Form -> (share of rows from which it is no chance that it scores as much as the truth, in words what it does)."""
WHOSE = ("truth", "another's truth", "responses")
EXAMPLES = 3
"""Examples shown of each finding."""
LEAST_SIGNAL = 0.3
FAILURES = 10
"""Reasons shown why programs failed."""


@dataclass
class Findings:
    """What came out of a try: problems (worth a look before a run) and the numbers behind them."""

    rows: int = 0
    unmatched: Counter[str] = field(default_factory=Counter)
    """Data sources without a scorer, and how many rows have them."""
    unscored: list[tuple[int, str, float]] = field(default_factory=list)
    """Truths that do not score 1 against themselves: row, truth, best score."""
    by_form: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    best: list[float] = field(default_factory=list)
    responses: list[float] = field(default_factory=list)
    unanswered: list[tuple[int, str]] = field(default_factory=list)
    """Responses from which no answer was extracted: row, response."""
    parts: dict[str, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    """Part -> whose (truth, another's truth, responses) -> values."""
    groups: dict[Any, list[tuple[float, bool]]] = field(default_factory=lambda: defaultdict(list))
    """Of responses that were sampled together: score, and whether the reward takes it for right."""
    model: str = ""
    """What the responses were sampled from, in words."""
    agrees: Counter[tuple[bool, bool]] = field(default_factory=Counter)
    """(the reward takes the response for right, its answer is the truth) -> how many."""
    errors: Counter[str] = field(default_factory=Counter)
    failed_forms: Counter[str] = field(default_factory=Counter)
    """Forms of the response that the reward failed on."""
    failed_rows: int = 0
    """Rows of which no spelling of the truth could be scored."""
    failures: Counter[str] = field(default_factory=Counter)
    """Why programs failed their tests, where a scorer says so; no problem by itself."""
    prints: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Of each call that came back."""
    flaky: list[tuple[int, str, float, float]] = field(default_factory=list)
    """Responses that got another score the second time: row, form, both scores."""
    told_apart: list[float] = field(default_factory=list)
    """By row: the truth's best score less the best of another row's truth."""

    unearned: dict[str, list[bool]] = field(default_factory=lambda: defaultdict(list))
    """Form of a response that knows nothing -> by row, whether it scores as much as the truth."""

    @property
    def ok(self) -> bool:
        """Whether nothing was found that would spoil a run."""
        found = self.unmatched or self.unscored or self.errors or self.flaky
        return not (found or self.blind or self.silent or self.mute or self.loopholes())

    def loopholes(self) -> list[str]:
        """In words, how a response that knows nothing earns what the truth does; of a reward that tells answers
        apart, as any other pays everything."""
        if self.blind:
            return []
        return [
            f"A response that {UNEARNED[form][1]} scores as much as the right answer in {sum(paid)} of {len(paid)} rows"
            for form, paid in self.unearned.items()
            if paid and sum(paid) > UNEARNED[form][0] * len(paid)
        ]

    @property
    def mute(self) -> bool:
        """Whether answers are missing; of what a model sampled one in ten may be."""
        return len(self.unanswered) > (0.1 * len(self.responses) if self.groups else 0)

    @property
    def blind(self) -> bool:
        """Whether right and wrong answers score alike (or the wrong ones higher) in most rows."""
        return sum(gap > 0 for gap in self.told_apart) < len(self.told_apart) / 2

    @property
    def signal(self) -> float | None:
        """The share of groups whose scores differ: the others would teach nothing."""
        several = [group for group in self.groups.values() if len(group) > 1]
        return sum(len({score for score, _ in group}) > 1 for group in several) / len(several) if several else None

    @property
    def silent(self) -> bool:
        """Whether most groups would teach nothing (the diagnosis of a run draws the line at the same place)."""
        return self.signal is not None and self.signal < LEAST_SIGNAL


def report(found: Findings, spec: RewardSpec) -> str:
    """The findings as a page of text."""
    lines = [f"reward: {spec.label}", f"rows:   {found.rows}"]
    for source, count in found.unmatched.most_common():
        lines.append(
            f"! {count} rows have data_source {source!r}, which has no scorer (known: {', '.join(known_sources())})"
        )
    if found.best:
        lines += ["", "truths scored against themselves (best spelling): " + distribution(found.best)]
        if found.unscored:
            lines.append(
                f"! {len(found.unscored)} of {len(found.best)} truths do not score 1 against themselves, for example:"
            )
            lines += [
                f"    row {row}: {_short(truth)} scores {score:g}" for row, truth, score in found.unscored[:EXAMPLES]
            ]
            lines.append(
                "    so no response can earn their full reward: bring the truths into the form that the reward reads"
            )
        lines += ["", "mean score by form of the response:"]
        lines += [f"    {form:<34} {_mean(scores):>8.3f}" for form, scores in found.by_form.items()]
        lines += _agreement(found)
        lines += [f"! {words}: a model would learn that instead of the task" for words in found.loopholes()]
    lines += ["", *_response_lines(found)]
    lines += _part_lines(found)
    if found.failures:
        lines += ["programs failed because of:"]
        lines += [f"    {count:>4} x {failure}" for failure, count in found.failures.most_common(FAILURES)]
    for error, count in found.errors.most_common(EXAMPLES):
        lines += [f"! {count} calls failed: " + error.replace("\n", "\n    ")]
    for row, form, first, second in found.flaky[:EXAMPLES]:
        lines.append(f"! row {row}, {form}: scored {first:g}, and {second:g} when asked again")
    if found.flaky:
        lines.append(f"    {len(found.flaky)} scores of the same response differ: a run could not be repeated")
    if found.seconds:
        lines.append(timing(found.seconds))
    lines += [f"printed: {line}" for line in found.prints[:EXAMPLES]]
    lines.append("nothing suspicious found" if found.ok else "look at the lines marked `!` before you train")
    return "\n".join(lines)


def timing(seconds: Sequence[float]) -> str:
    """How long a call takes, and how many a second one worker makes."""
    ordered, mean = sorted(seconds), _mean(seconds)
    late = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return (
        f"time of a call: {_span(mean)} on average, {_span(late)} for the slowest hundredth, {_span(ordered[-1])} at "
        f"most; one worker makes {1 / max(mean, 1e-9):,.0f} a second"
    )


def _span(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1000 * seconds:.2g} ms"


def _agreement(found: Findings) -> list[str]:
    """How often the truth scores above another row's truth: what a group can learn from."""
    if not found.told_apart:
        return []
    above = sum(gap > 0 for gap in found.told_apart)
    below = sum(gap < 0 for gap in found.told_apart)
    mark = "! " if found.blind else ""
    text = f"{mark}the truth scores above another row's truth in {above} of {len(found.told_apart)} rows"
    return [text + (f", and below it in {below}" if below else "")]


def distribution(scores: Sequence[float]) -> str:
    """`mean 0.900, min 0, max 1; 1: 90, 0: 10` (the eight most frequent values)."""
    counts = Counter(round(score, 4) for score in scores).most_common()
    shown = ", ".join(f"{score:g}: {count}" for score, count in counts[:8]) + (", ..." if len(counts) > 8 else "")
    return f"mean {_mean(scores):.3f}, min {min(scores):g}, max {max(scores):g}; {shown}"


def _part_lines(found: Findings) -> list[str]:
    """A table of means, a column for each kind of response; beside it how the responses' values are spread."""
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
    """What a run would have to learn from, were its rollouts these."""
    if found.signal is None:
        return []
    groups = [group for group in found.groups.values() if len(group) > 1]
    right = sum(all(is_right for _, is_right in group) for group in groups)
    wrong = sum(not any(is_right for _, is_right in group) for group in groups)
    mark, with_signal = "! " if found.silent else "", round(found.signal * len(groups))
    lines = [
        f"{mark}groups that would carry signal: {with_signal} of {len(groups)} ({found.signal:.0%}); all right "
        f"{right}, all wrong {wrong}"
    ]
    if found.silent:
        cause = "harder prompts" if right > wrong else "easier prompts, a model that was fine-tuned on the task first"
        lines.append(f"    the others have equal scores and teach nothing: take {cause}, a finer reward or a larger -k")
    return lines


def _agreement_of_responses(found: Findings) -> list[str]:
    """Where the reward and the truth part ways; what a reward counts besides may be meant."""
    if not found.agrees:
        return []
    total, same = sum(found.agrees.values()), found.agrees[True, True] + found.agrees[False, False]
    text = f"the reward agrees with the ground truth on {same} of {total} answers that can be read ({same / total:.0%})"
    generous, strict = found.agrees[True, False], found.agrees[False, True]
    return [
        text
        + (f"; it takes {generous} others for right, and {strict} that are the truth for wrong" if same < total else "")
    ]


def _response_lines(found: Findings) -> list[str]:
    if not found.responses:
        return ["responses: none given (--model M samples some, --responses FILE takes those of a run)"]
    whose = f" of {found.model}" if found.model else ""
    lines = [f"responses: {len(found.responses)}{whose}, " + distribution(found.responses)]
    lines += _group_lines(found) + _agreement_of_responses(found)
    if found.unanswered:
        mark, count = "! " if found.mute else "", len(found.unanswered)
        lines.append(f"{mark}{count} of {len(found.responses)} responses gave no extracted answer, for example:")
        lines += [f"    row {row}: {_short(response)}" for row, response in found.unanswered[:EXAMPLES]]
    return lines


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return repr(flat if len(flat) <= 80 else "..." + flat[-77:])
