"""The questions of the page: a name and plain texts in, an object for JSON (or a stream of them) out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.errors import first_line
from posttrain.view import health, samples
from posttrain.view.catalogue import Catalogue, TrigramIndex, answering, previews, search
from posttrain.view.runs import Metrics, Runs, describe_run, details, differences, settings

Query = Mapping[str, str]
LEARN_AFTER_S = 0.8  # until background reading starts


class NotFound(LookupError):
    """There is no such question, run or sample."""


class Answers:
    """Answers for the runs of `runs`; what was read is kept between questions."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self._metrics: dict[Path, Metrics] = {}
        self._catalogues: dict[tuple[Path, str], Catalogue] = {}
        self._trigrams: dict[tuple[Path, str], TrigramIndex] = {}
        self._pending: set[str] = set()
        self._questions: dict[str, Callable[[Query], Any]] = {
            "runs": lambda q: [describe_run(name, folder) for name, folder in self.runs.folders().items()],
            "run": lambda q: describe_run(q["run"], self._folder(q)),
            "metrics": self._columns,
            "config": lambda q: settings(self._folder(q)),
            "details": lambda q: details(self._folder(q)),
            "explain": lambda q: self._explain_metrics(self.metrics(self._folder(q)).refresh().names),
            "compare": lambda q: differences({name: self._folder({"run": name}) for name in q["runs"].split("\t")}),
            "steps": self._steps,
            "groups": lambda q: samples.groups(self._folder(q), _kind(q), int(q["step"])),
            "group": lambda q: samples.group(self._folder(q), _kind(q), int(q["step"]), q["uid"]),
            "response": lambda q: samples.response(
                self._folder(q),
                _kind(q),
                int(q["step"]),
                q["uid"],
                int(q["sample"]),
                int(q["branch"]) if q.get("branch") else None,
            ),
            "find": lambda q: self._catalogue(q).find(q["which"], int(q["step"]) if q.get("step") else None),
            "previews": lambda q: previews(self._folder(q), _kind(q), _places(q["rows"])),
            "same": lambda q: self._catalogue(q).same_prompt(int(q["data_row"])),
            "search": self._search,
            "diagnosis": lambda q: health.diagnosis(self._folder(q), self.metrics(self._folder(q)).refresh().names),
            "failures": lambda q: health.failures(self._catalogue(q)),
            "plan": lambda q: health.planned_memory(self._folder(q)),
            "timeline": lambda q: health.timeline(self._folder(q), int(q["last"]) if q.get("last") else None),
        }

    def answer(self, name: str, query: Query) -> Any:
        if name not in self._questions:
            raise NotFound(f"There is nothing called `{name}`.")
        try:
            with answering():
                return self._questions[name](query)
        except (samples.NoSamples, health.NoPlan) as error:
            raise NotFound(str(error)) from error
        except (NotFound, KeyError) as error:  # the question itself is wrong
            raise error
        except Exception as error:
            if isinstance(error, ValueError) and not isinstance(error, pa.ArrowException):
                raise
            # Files of a run may hold anything: the page shows the problem and stays usable.
            raise NotFound(f"The files of this run cannot be read: {first_line(error)}.") from error

    def read_all(self, run: str) -> None:
        """Wait until everything is known of a run's samples."""
        for kind in samples.KINDS:
            catalogue = self._catalogue({"run": run, "kind": kind})
            catalogue.refresh()
            catalogue.wait()

    def metrics(self, folder: Path) -> Metrics:
        return self._metrics.setdefault(folder, Metrics(folder / "metrics.jsonl"))

    def _folder(self, query: Query) -> Path:
        folder = self.runs.folder(query["run"])
        if folder is None:
            raise NotFound(f"There is no run `{query['run']}` here.")
        return folder

    def _columns(self, query: Query) -> dict[str, Any]:
        names = query.get("names", "").split(",")
        after, identity = int(query.get("after") or 0), query.get("identity", "")
        return self.metrics(self._folder(query)).columns(names, after=after, identity=identity)

    @staticmethod
    def _explain_metrics(names: list[str]) -> dict[str, str]:
        from posttrain.explain.pages import metric_text  # a second of imports: not before the first page is shown

        texts = {name: metric_text(name) for name in names}
        return {name: " ".join(text.split()) for name, text in texts.items() if text}

    def _steps(self, query: Query) -> dict[str, list[int]]:
        found = samples.steps(self._folder(query))
        if query.get("learn"):  # samples are being viewed: filters and searches come next
            self._learn_soon(query["run"])
        return found

    def _learn_soon(self, run: str) -> None:
        # Background reading starts after the page's own first questions.
        if run not in self._pending:
            self._pending.add(run)
            timer = threading.Timer(LEARN_AFTER_S, self._learn_all, (run,))
            timer.daemon = True
            timer.start()

    def _learn_all(self, run: str) -> None:
        self._pending.discard(run)
        with suppress(NotFound):  # it was removed meanwhile
            for kind in ("val", "step"):
                catalogue = self._catalogue({"run": run, "kind": kind})
                catalogue.refresh()
                # The index for searches is built after the catalogue, which filters need first.
                files = list(reversed(samples.KINDS[kind](catalogue.folder / "samples")))
                self._trigrams_of(catalogue.folder, kind).learn(files, catalogue.wait)

    def _catalogue(self, query: Query) -> Catalogue:
        key = (self._folder(query), _kind(query))
        return self._catalogues.setdefault(key, Catalogue(*key))

    def _search(self, query: Query) -> Any:
        folder, kind = self._folder(query), _kind(query)
        before = int(query["before"]) if query.get("before") else None
        return search(folder, kind, query["words"], self._trigrams_of(folder, kind), before=before)

    def _trigrams_of(self, folder: Path, kind: str) -> TrigramIndex:
        return self._trigrams.setdefault((folder, kind), TrigramIndex())


def _kind(query: Query) -> str:
    kind = query.get("kind") or "step"
    if kind not in samples.KINDS:
        raise NotFound(f"There are samples of steps and of validations (val), not of `{kind}`.")
    return kind


def _places(text: str) -> list[tuple[int, int]]:
    # `12.3,12.4`: step.row
    pairs = [pair.split(".") for pair in text.split(",") if pair]
    return [(int(step), int(row)) for step, row in pairs[:100]]
