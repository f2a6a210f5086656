"""The questions of the page: a name and plain texts in, an object for JSON (or a stream of them) out."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.errors import first_line
from posttrain.tracking.rundir import DIAGNOSIS, TIMELINE, read_lines
from posttrain.tracking.safe_files import read_settings
from posttrain.tracking.step_line import error_kind
from posttrain.view import samples
from posttrain.view.catalogue import Catalogue, TrigramIndex, answering, by_step, previews, search
from posttrain.view.runs import Metrics, Runs, describe_run, details, differences, settings
from posttrain.view.samples import SampleFile, preview

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
            "diagnosis": lambda q: diagnosis(self._folder(q), self.metrics(self._folder(q)).refresh().names),
            "failures": lambda q: failures(self._catalogue(q)),
            "plan": lambda q: planned_memory(self._folder(q)),
            "timeline": lambda q: timeline(self._folder(q), int(q["last"]) if q.get("last") else None),
        }

    def answer(self, name: str, query: Query) -> Any:
        if name not in self._questions:
            raise NotFound(f"There is nothing called `{name}`.")
        try:
            with answering():
                return self._questions[name](query)
        except (samples.NoSamples, NoPlan) as error:
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
        from posttrain.explain import metric_text  # a second of imports: not before the first page is shown

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


# The health of a run: advice with its metric, failures of the reward with their inputs, stages in time, planned memory
# of each stage.


# The metric of an advice by its words, for lines of diagnosis.jsonl that have only texts.
METRIC_OF = {
    r"rewards are (all )?0": "reward_mean",
    r"reward failed": "reward/failures",
    r"equal rewards": "groups/no_signal",
    r"reward fell": "reward_mean",
    r"not finite": "actor/bad_steps",
    r"tokens are clipped": "actor/pg_clipfrac",
    r"gradient norm": "actor/grad_norm",
    r"kl_loss": "kl_loss",
    r"Responses (grew|shrank)": "response_length",
    r"cut off": "response_length/clip_ratio",
    r"entropy": "actor/entropy",
}
TIMELINE_STEPS = 40


def diagnosis(folder: Path, names: list[str]) -> list[dict[str, Any]]:
    """Advice of all steps: (step, text, the metric behind it, its rule)."""
    found = []
    for line in read_lines(folder / DIAGNOSIS):
        step, said = line.get("step"), line.get("advice")
        if not isinstance(step, int) or not isinstance(said, list):
            continue
        for advice in said:
            about = advice if isinstance(advice, dict) else {"text": advice}
            text, rule, named = str(about.get("text", "")), about.get("rule"), about.get("metric")
            metric = named if isinstance(named, str) and named else _metric_of(text, names)
            found.append(
                {"step": step, "text": text, "metric": metric, "rule": rule if isinstance(rule, str) else None}
            )
    return found


def _metric_of(text: str, names: list[str]) -> str | None:
    named = [name for name in names if "/" in name and name in text]
    if named:
        return max(named, key=len)
    return next((metric for words, metric in METRIC_OF.items() if re.search(words, text)), None)


def failures(catalogue: Catalogue) -> dict[str, Any]:
    """Errors of the reward by kind: how many, and the newest response of each with its inputs."""
    found = catalogue.find("failed")
    kinds: dict[tuple[str, str], dict[str, Any]] = {}
    for step, rows in by_step((one["step"], one["row"]) for one in found["found"]).items():
        try:
            file = SampleFile(catalogue.folder / "samples" / f"{catalogue.kind}_{step}.parquet")
            texts = file.take(rows, ("uid", "sample", "error", "prompt", "response", "ground_truth"))
        except (OSError, pa.ArrowException):
            continue
        for one in texts:
            inputs = {name: preview(one[name]) for name in ("prompt", "response", "ground_truth")}
            newest = {
                "error": one["error"],
                "count": 0,
                "step": step,
                "uid": one["uid"],
                "sample": one["sample"],
            } | inputs
            kind = kinds.setdefault(error_kind(one["error"] or ""), newest)
            kind["count"] += 1
    ordered = sorted(kinds.values(), key=lambda kind: -kind["count"])
    return {"kinds": ordered, "count": found["count"], "read": found["read"], "files": found["files"]}


def timeline(folder: Path, last: int | None = None) -> dict[str, Any]:
    """When the stages of some steps began and how long they took, up to step `last` or the newest."""
    lines = [line for line in read_lines(folder / TIMELINE) if isinstance(line.get("step"), int)]
    kept = [line for line in lines if last is None or line["step"] <= last][-TIMELINE_STEPS:]
    steps = [{"step": line["step"], "stages": _spans(line.get("stages"))} for line in kept]
    return {"steps": steps, "range": [lines[0]["step"], lines[-1]["step"]] if lines else None}


def _spans(stages: Any) -> list[list[Any]]:
    # [stage, start, seconds, perhaps the lane]; anything else in the file is ignored. Workers record the names of their
    # methods: they are shown as the stage that they belong to, in its colour.
    known = [span[:4] for span in stages if _is_span(span)] if isinstance(stages, list) else []
    return [[STAGE_OF.get(span[0], span[0]), *span[1:]] if len(span) > 3 else span for span in known]


STAGE_OF = {
    **dict.fromkeys(("submit", "advance", "continue_conversations", "end_conversations", "generate_sequences"), "gen"),
    **dict.fromkeys(("next_bucket", "take_bucket", "finish_sync", "sync_weights", "take_schedule"), "sync"),
    **dict.fromkeys(("probe_scores", "rollout_scores", "lost_weights", "sender_place", "receiver_place"), "sync"),
    **dict.fromkeys(("save", "begin_save", "export_hf"), "save_checkpoint"),
    "compute_rm_score": "reward_model",
    "compute_log_prob": "old_log_prob",
    "compute_sum_pi_squared": "sum_pi_squared",
    "compute_ref_log_prob": "ref",
    "compute_values": "values",
    "token_stats": "update_actor",
}


def _is_span(span: Any) -> bool:
    if not isinstance(span, list) or len(span) < 3 or not isinstance(span[0], str):
        return False
    return all(isinstance(value, int | float) and math.isfinite(value) for value in span[1:3]) and all(
        isinstance(worker, str | int | None) for worker in span[3:4]
    )


# Stage of the plan -> the stages of a run that it covers.
MEASURED = {
    "generate": ("gen",),
    "log-probs": ("old_log_prob", "ref", "values", "reward_model"),
    "update": ("update_actor", "update_critic"),
}


class NoPlan(LookupError):
    """These settings cannot be planned for here; the message says why."""


def planned_memory(folder: Path) -> dict[str, Any]:
    """Planned GB by stage, with the run's stages that each covers. Loads torch, but no weights."""
    from posttrain.config import load_config
    from posttrain.errors import UserError
    from posttrain.planning.budgets import apply_plan, planner_for
    from posttrain.planning.memory_plan import find_device

    try:
        tree = read_settings(folder / "config.yaml")
        if "actor_rollout_ref" not in tree:
            raise NoPlan("Only runs of the PPO family are planned here; `posttrain plan sft ...` plans others.")
        resolved = load_config(_without_model_code(tree))
        config, device, planner = resolved.config, find_device(resolved.config), planner_for(resolved.config)
        apply_plan(config, device, resolved.explicit, planner)
        found = planner.plan(config, device)
    except (UserError, OSError, TypeError) as error:
        raise NoPlan(f"This run cannot be planned here: {error}") from error
    stages = [
        {"stage": stage, "gb": found.peak(stage) / 1e9, "measured": MEASURED.get(stage, ())} for stage in found.stages
    ]
    words = (
        f"Planned for {found.device.words}: the tensors that the run makes. Measured on a CPU is all that the process "
        "held, torch itself among it."
    )
    return {"words": words, "stages": stages, "peak_gb": found.peak() / 1e9}


def _without_model_code(tree: Any) -> Any:
    # Viewing another user's run must not execute the code that comes with its model.
    if not isinstance(tree, dict):
        return tree
    return {key: False if key == "trust_remote_code" else _without_model_code(value) for key, value in tree.items()}
