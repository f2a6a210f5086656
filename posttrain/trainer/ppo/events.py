"""The event log of an asynchronous run, `events.jsonl`, and its replay.

Which prompts are asked for at which policy version follows from the settings. A clock decides between which decode
steps an engine gets requests, next turns and new weights; with several engines also which of them gets a group, and
with over-sampling which groups are whole first. Every engine counts its steps and keeps its schedule. The log has
schedules and choices, and a replay holds each engine to them:

    {"step": 2, "engine": 0, "steps": 41, "do": "weights", "of": [2]}     behind 41 steps it got version 2
    {"step": 2, "ask": ["8", "9"], "version": 1}                          groups, and the version that begins them
    {"step": 3, "take": ["4", "5"], "versions": [0, 2]}                   groups, and versions of their tokens
    {"step": 3, "weights": 3, "checksum": 1234.0}                         the policy after step 3
    {"step": 4, "drained": true}                                          a checkpoint: nothing is under way
    {"step": 4, "placed": [0, 1, 1]}                                      engines of the groups that are asked for
    {"step": 5, "whole": ["7", "8"]}                                      groups that were taken, as they were whole

Steps are counted from the last line that says `drained`, so that a replay may begin at any checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import UserError
from posttrain.tracking.rundir import EVENTS, append_line, read_lines
from posttrain.workers.groups import RolloutGroup
from posttrain.workers.rollout import Entry

Due = tuple[str, int, list[Any]]
"""(`turns` or `end`, engine, of which): what is to be done to an engine for conversations."""
SETTINGS = "settings"  # what a replay must have in common with the run: its first line, and where they were changed


class ReplayError(UserError):
    """A run does not repeat the one whose events it was given."""


class EventLog:
    """Appends to a run's `events.jsonl`; with `replayed` it compares what a log can be compared by."""

    def __init__(self, folder: Path, replayed: Replay | None = None) -> None:
        self.path, self.replayed, self.step = folder / EVENTS, replayed, 1

    def begin(self, step: int, settings: Mapping[str, Any]) -> None:
        """The first event of a run; one that continues `step` has its log up to there."""
        self.step = step + 1
        if step == 0:
            self.path.unlink(missing_ok=True)  # of a run that was begun here before
        known = [line[SETTINGS] for line in read_lines(self.path) if SETTINGS in line]
        if known[-1:] != [settings]:
            append_line(self.path, {"step": step, SETTINGS: dict(settings)})
        if self.replayed is not None:
            self.replayed.begin(step, settings)

    def add(self, **event: Any) -> None:
        append_line(self.path, {"step": self.step, **event})

    def add_weights(self, version: int, checksum: float | None) -> None:
        """New weights; in a replay they must be those of the log."""
        self.add(weights=version, checksum=checksum)
        if self.replayed is not None:
            self.replayed.check_weights(version, checksum)


class Replay:
    """What the log of another run says, engine by engine."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.lines = list(read_lines(Path(path)))
        if not self.lines or SETTINGS not in self.lines[0]:
            raise ReplayError(
                f"trainer.replay_events={path} is no event log. Give the {EVENTS} of a run directory; it is written "
                "by runs with trainer.max_staleness above 0."
            )
        self.checksums = {line["weights"]: line["checksum"] for line in self.lines if "weights" in line}

    @property
    def drains(self) -> set[int]:
        """Steps behind which nothing was under way."""
        return {line["step"] for line in self.lines if line.get("drained")}

    def begin(self, step: int, settings: Mapping[str, Any]) -> None:
        """Check that this run can repeat the recorded one from here on."""
        # A run that was continued with other settings is repeated up to there.
        changed = [at for at, line in enumerate(self.lines) if SETTINGS in line and line["step"] > step]
        self.lines = self.lines[: changed[0]] if changed else self.lines
        known = next(line[SETTINGS] for line in reversed(self.lines) if SETTINGS in line)
        differ = [f"{key}={settings.get(key)} (it had {was})" for key, was in known.items() if settings.get(key) != was]
        if differ:
            raise ReplayError(f"trainer.replay_events={self.path}: the recorded run had other settings: "
                              f"{', '.join(differ)}. Set them as they were.")  # fmt: skip
        if step and step not in self.drains:
            raise ReplayError(
                f"trainer.replay_events={self.path} has no checkpoint of step {step}, from which this run continues. "
                "Start from a checkpoint of the recorded run, or from the beginning (another trainer.experiment_name)."
            )

    def entries(self, step: int, engines: int) -> list[list[Entry]]:
        """By engine, its schedule from behind this step up to where it was drained next."""
        found: list[list[Entry]] = [[] for _ in range(engines)]
        for line in self._lines_behind(step):
            if "engine" in line:
                found[line["engine"]].append((line["steps"], line["do"], line["of"]))
        return found

    def choices(self, step: int) -> dict[str, list[list[Any]]]:
        """By name, the choices that were made from behind this step up to where the engines were drained next."""
        lines = list(self._lines_behind(step))
        return {what: [line[what] for line in lines if what in line] for what in ("placed", "whole")}

    def _lines_behind(self, step: int) -> Iterator[dict[str, Any]]:
        end = min((drained for drained in self.drains if drained > step), default=self.lines[-1]["step"])
        return (line for line in self.lines if step < line["step"] <= end)

    def check_weights(self, version: int, checksum: float | None) -> None:
        if version in self.checksums and self.checksums[version] != checksum:
            raise ReplayError(
                f"trainer.replay_events={self.path}: the weights after step {version} are not those of the recorded "
                "run. Model, data, settings, number of workers and threads, and the machine's kernels must be the same."
            )


class EngineClock:
    """Steps of each engine since it was last drained, for an experience whose weights change in flight.

    In a replay it says how many steps an engine may make before something is to be done to it, and when it is due.
    """

    def __init__(self, rollout: RolloutGroup, log: EventLog) -> None:
        self.rollout, self.log = rollout, log
        self.engines = rollout.submit.world_size
        self.base = [0] * self.engines
        self.steps = [0] * self.engines  # as far as known
        self.expected: list[list[Entry]] = [[] for _ in range(self.engines)]
        # Turns that are ready, and conversations that have ended, before their place in the replay: by engine and id.
        self._held: dict[tuple[str, int], dict[tuple[Any, ...], Any]] = {}
        self._choices: dict[str, list[list[Any]]] = {}  # of the replayed run, those that are to come

    def write_schedule(self) -> None:
        """Write what was done to the engines since the last call."""
        for engine, (steps, entries) in enumerate(self.rollout.take_schedule()):
            self.steps[engine] = steps
            for at, what, ids in entries:
                self.log.add(engine=engine, steps=at - self.base[engine], do=what, of=ids)

    def restart(self, step: int) -> None:
        """Nothing is under way: count from here."""
        self.base = [steps for steps, _ in self.rollout.take_schedule()]
        self.steps = list(self.base)
        if self.log.replayed is not None:
            self.expected = self.log.replayed.entries(step, self.engines)
            self._choices = self.log.replayed.choices(step)

    # -- choices --------------------------------------------------------------------------------------------------
    def choose(self, what: str, make: Callable[[], list[Any]]) -> list[Any]:
        """What a clock decides, `placed` or `whole`: it is written to the log, and in a replay read from there."""
        recorded = self._choices.get(what)
        chosen = recorded.pop(0) if recorded else make()
        self.log.add(**{what: chosen})
        return chosen

    def place(self, loads: Sequence[int], groups: Sequence[int]) -> list[int]:
        """The engine of each group of so many requests: the one with the fewest under way, where engines have `loads`
        before."""

        def least_loaded() -> list[Any]:
            under_way, chosen = list(loads), []
            for size in groups:
                chosen.append(min(range(self.engines), key=lambda engine: (under_way[engine], engine)))
                under_way[chosen[-1]] += size
            return chosen

        placed = self.choose("placed", least_loaded)
        if len(placed) != len(groups):
            raise ReplayError("This run does not ask for the groups that the replayed run asked for: its data differ.")
        return placed

    # -- replay ---------------------------------------------------------------------------------------------------
    def note_steps(self, engine: int, steps: int) -> None:
        self.steps[engine] = steps

    def steps_left(self, engine: int) -> int | None:
        """Steps before something is to be done to this engine; None: any number."""
        entries = self.expected[engine]
        return entries[0][0] + self.base[engine] - self.steps[engine] if entries else None

    def is_due(self, what: str) -> bool:
        """Whether all engines have come to where the recorded run did this."""
        return all(
            not rest or (self.steps_left(engine) == 0 and rest[0][1] == what)
            for engine, rest in enumerate(self.expected)
        )

    def holds(self, engines: Iterable[int]) -> bool:
        """Whether all of these wait for something that is to be done to them."""
        return all(self.steps_left(engine) == 0 for engine in engines)

    def done(self, what: str) -> None:
        """All engines got it."""
        for rest in self.expected:
            if rest:
                assert rest.pop(0)[1] == what

    def admit(self, ready: list[Due]) -> list[Due]:
        """Of the turns that are ready and the conversations that have ended, those whose place has come, in order."""
        if self.log.replayed is None:
            return ready
        for what, engine, own in ready:
            held = self._held.setdefault((what, engine), {})
            held |= {_id(one): one for one in own}
        return [due for engine in range(self.engines) for due in self._due_of(engine)]

    def _due_of(self, engine: int) -> Iterator[Due]:
        rest = self.expected[engine]
        while rest and self.steps_left(engine) == 0:
            what, ids = rest[0][1], [tuple(id) for id in rest[0][2]] if rest[0][1] in ("turns", "end") else []
            held = self._held.get((what, engine), {})
            if not ids or not held.keys() >= set(ids):
                return
            del rest[0]
            yield what, engine, [held.pop(id) for id in ids]
        if not rest:  # the log ends here: the run goes on without it
            for what in ("turns", "end"):
                if held := self._held.pop((what, engine), {}):
                    yield what, engine, list(held.values())


def _id(one: Any) -> tuple[Any, ...]:
    """Of a turn, or of a conversation, which is its key."""
    return tuple(getattr(one, "id", one))
