"""Where metrics go: `metrics.jsonl` always, and details on the console and services as `trainer.logger` says.

A logger has `log(step, metrics)` and `close()`. One that fails is reported once and skipped from then on: a run never
ends because of a logger. Only `metrics.jsonl`, which posttrain's own tools read, must be writable.

Services (wandb, MLflow, ...) record below the run directory unless a key or a server's address is set, so that nothing
leaves the machine by default. They get the settings without secrets.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from posttrain.errors import UserError
from posttrain.registry import Registry
from posttrain.texts import redact, utf8
from posttrain.tracking.console import active
from posttrain.tracking.diagnosis import stage_shares
from posttrain.tracking.rundir import RunDirectory, flatten
from posttrain.tracking.safe_files import replace_file

Note = Callable[[str], object]


class Logger(Protocol):
    """Receives every metric of every step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlLogger:
    """One JSON object per line, `step` first, `time` last if there is a clock.

    Floats are read back bit-for-bit; NaN and infinities, which JSON does not have, are written as text.
    """

    def __init__(self, path: Path, clock: Callable[[], float] | None = None) -> None:
        self._file, self._clock = path.open("ab"), clock

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if os.fstat(self._file.fileno()).st_nlink == 0:  # deleted: lines written to it would be lost silently
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._file.name)
        line = as_line(step, metrics)
        if self._clock is not None:
            line["time"] = round(self._clock(), 3)
        self._file.write(utf8(json.dumps(line, ensure_ascii=False, allow_nan=False)) + b"\n")
        self._file.flush()
        # Each line reaches the disk before the next step: after a power cut the curves go as far as the run did.
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def as_line(step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
    return {"step": step, **{name: _plain(value) for name, value in metrics.items() if name != "step"}}


def read_metrics(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, NaN and infinities as floats; a last line without its end is skipped."""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                try:
                    found = json.loads(line).items()
                except (ValueError, AttributeError):
                    # A run writes whole lines only, so something else changed the file: no line of it is guessed.
                    raise UserError(
                        f"{path}, line {number}: not a JSON object, so the file is damaged. Restore it from a copy, or "
                        "remove that line."
                    ) from None
                yield {name: _number(value) for name, value in found}


def metrics_of_run(folder: Path) -> list[dict[str, Any]]:
    """All lines of a run's `metrics.jsonl`; none without the file."""
    path = folder / "metrics.jsonl"
    return list(read_metrics(path)) if path.is_file() else []


def main_metric(lines: Sequence[Mapping[str, Any]], least: int = 1) -> str | None:
    """What a run is judged by: the mean of a validation, else the reward or the loss; with `least` values or more."""
    names = [name for line in lines for name in line if name.startswith("val/") and "/mean@" in name]
    watched = (*dict.fromkeys(names), "reward_mean", "val/loss", "train/loss")
    return next((name for name in watched if sum(name in line for line in lines) >= least), None)


class DetailsLogger:
    """Under a step's line: where its time went, and every metric, in rows of at most 100 columns."""

    def __init__(self, say: Note) -> None:
        self._say = say

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        shares = stage_shares(metrics)
        words = [f"{name} {_short(value)}" for name, value in metrics.items()]
        rows = ([f"  time: {shares}"] if shares else []) + _rows(words, 100)
        self._say("\n".join(rows))

    def close(self) -> None:
        pass


class LoggerGroup:
    """All loggers of a run as one; it also prints the lines of `--json`."""

    def __init__(self, required: Logger, optional: dict[str, Logger], note: Note) -> None:
        self._required, self._optional, self._note = required, optional, note

    def log(self, step: int, metrics: Mapping[str, float], advice: Sequence[Mapping[str, str]] = ()) -> None:
        """`advice`: sentences of the diagnosis, which `--json` shows with the step."""
        # The run's own file first, and outside of the protection: without it the run must not go on.
        self._required.log(step, metrics)
        self._each(lambda logger: logger.log(step, metrics))
        if (console := active()) is not None:
            console.write_step(as_line(step, metrics) | ({"advice": list(advice)} if advice else {}))

    def close(self) -> None:
        self._required.close()
        self._each(lambda logger: logger.close())
        self._optional = {}

    def _each(self, act: Callable[[Logger], None]) -> None:
        for name, logger in list(self._optional.items()):
            try:
                act(logger)
            except Exception as error:
                # A server that is down must not end a long run; the file in the run directory has all metrics.
                self._note(f"The logger {name} failed and is left out from here on: {type(error).__name__}: {error}")
                del self._optional[name]


# (run, settings, first step that will be logged, say) -> logger.
LoggerMaker = Callable[[RunDirectory, Mapping[str, Any], int, Note], Logger]
MAKERS: Registry[LoggerMaker] = Registry("logger")  # by the name that `trainer.logger` gives
register_logger = MAKERS.register
register_logger("details")(lambda run, config, first_step, say: DetailsLogger(say))
register_logger("tensorboard")(
    lambda run, config, first_step, say: TensorBoardLogger(run.path / "tensorboard", first_step)
)
register_logger("wandb")(lambda run, config, first_step, say: WandbLogger(run, config, say))
register_logger("mlflow")(lambda run, config, first_step, say: MlflowLogger(run, config, say))
register_logger("swanlab")(lambda run, config, first_step, say: SwanlabLogger(run, config, say))
register_logger("trackio")(lambda run, config, first_step, say: TrackioLogger(run, config, say))
# `console` is the line that a run prints per step; it needs no logger.
LOGGERS = ("console", *MAKERS)


def open_loggers(
    names: Sequence[str],
    run: RunDirectory,
    config: Mapping[str, Any],
    *,
    first_step: int = 0,
    say: Note = print,
    clock: Callable[[], float] | None = None,
) -> LoggerGroup:
    """`metrics.jsonl` and the loggers named in `trainer.logger`; `first_step` is the first that will be logged.

    With a clock every line of `metrics.jsonl` says its `time`.
    """
    unknown = sorted(set(names) - set(LOGGERS))
    if unknown:
        raise ValueError(f"trainer.logger names {', '.join(unknown)}; known are {', '.join(LOGGERS)}.")
    optional: dict[str, Logger] = {}
    for name in dict.fromkeys(names):
        if name not in MAKERS:
            continue
        try:
            optional[name] = MAKERS[name](run, config, first_step, say)
        except ImportError as error:
            say(f"The logger {name} is left out: {error}. Install it with `pip install 'posttrain[{name}]'`.")
        except Exception as error:
            say(f"The logger {name} is left out, as it could not start: {type(error).__name__}: {error}")
    return LoggerGroup(JsonlLogger(run.metrics, clock), optional, say)


def _rows(words: Sequence[str], width: int) -> list[str]:
    rows = [""]
    for word in words:
        if rows[-1] and len(rows[-1]) + len(word) + 2 > width:
            rows.append("")
        rows[-1] += f"  {word}"
    return rows


def _plain(value: Any) -> Any:
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, float) and not math.isfinite(number):
        return "NaN" if math.isnan(number) else ("Infinity" if number > 0 else "-Infinity")
    return number


def _number(value: Any) -> Any:
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# -- loggers that are packages of their own ----------------------------------------------------------------------------
_NOT_MLFLOW = re.compile(r"[^\w\-. /:]")


class TensorBoardLogger:
    """Event files under `<run>/tensorboard`; after a resume, later steps of the earlier process are hidden."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step or None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """A wandb run, sent to its server if WANDB_API_KEY is set and otherwise recorded below the run directory."""

    def __init__(self, run: RunDirectory, config: Mapping[str, Any], note: Note) -> None:
        import wandb  # pyright: ignore[reportMissingImports]  (an extra)

        online = bool(os.environ.get("WANDB_API_KEY"))
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if online else "offline")
        if mode == "offline":
            note(f"wandb records to {run.path / 'wandb'}; set WANDB_API_KEY to send runs, or run `wandb sync` later.")
        self._run = wandb.init(
            project=run.path.parent.name,
            name=run.path.name,
            id=_kept_id(run.path / "wandb_id", lambda: os.urandom(8).hex()),
            # With its stored id a resumed run continues the same curves; offline there is no server to ask.
            resume="allow" if mode == "online" else None,
            dir=str(run.path),
            config=redact(config),
            mode=mode,
            # Without metadata: wandb would record the command line, which may hold secrets.
            settings=wandb.Settings(console="off", silent=True, x_disable_meta=True),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowLogger:
    """A run of MLflow's experiment of the project's name: on the server of MLFLOW_TRACKING_URI, else in `mlflow.db`."""

    def __init__(self, run: RunDirectory, config: Mapping[str, Any], note: Note) -> None:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]  (an extra)

        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.path.absolute() / 'mlflow.db'}"
        if "MLFLOW_TRACKING_URI" not in os.environ:
            note(f"MLflow records to {run.path / 'mlflow.db'}; set MLFLOW_TRACKING_URI to send runs to a server.")
        self._client = MlflowClient(tracking_uri=address)
        project = run.path.parent.name
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project)
        make = lambda: self._client.create_run(experiment, run_name=run.path.name).info.run_id  # noqa: E731
        self._id = _kept_id(run.path / "mlflow_id", make)
        for key, value in flatten(redact(config)).items():
            self._client.log_param(self._id, _NOT_MLFLOW.sub("_", key), str(value)[:500])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(1000 * time.time())
        # MLflow knows no `@` in names: val/math/mean@1 is val/math/mean_1 there.
        sent = [Metric(_NOT_MLFLOW.sub("_", name), float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=sent)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class SwanlabLogger:
    """A SwanLab experiment, sent if SWANLAB_API_KEY is set and otherwise recorded under `<run>/swanlab`."""

    def __init__(self, run: RunDirectory, config: Mapping[str, Any], note: Note) -> None:
        import swanlab  # pyright: ignore[reportMissingImports]  (an extra)

        mode = os.environ.get("SWANLAB_MODE") or ("cloud" if os.environ.get("SWANLAB_API_KEY") else "offline")
        folder = run.path / "swanlab"
        folder.mkdir(exist_ok=True)
        if mode == "offline":
            note(f"SwanLab records to {folder}; set SWANLAB_API_KEY to send runs, or run `swanlab sync` later.")
        self._run = swanlab.init(
            project=run.path.parent.name,
            experiment_name=run.path.name,
            config=dict(redact(config)),
            logdir=str(folder),
            mode=mode,
        )
        self._swanlab = swanlab

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({name: float(value) for name, value in metrics.items() if _finite(value)}, step=step)

    def close(self) -> None:
        self._swanlab.finish()


class TrackioLogger:
    """A Trackio run, in TRACKIO_DIR or under `<run>/trackio`; `trackio show` opens its page."""

    def __init__(self, run: RunDirectory, config: Mapping[str, Any], note: Note) -> None:
        if "TRACKIO_DIR" not in os.environ:
            os.environ["TRACKIO_DIR"] = str(run.path.absolute() / "trackio")  # read when the package is imported
            note(f"Trackio records to {run.path / 'trackio'}; TRACKIO_DIR names another place.")
        import trackio  # pyright: ignore[reportMissingImports]  (an extra)

        self._trackio = trackio
        self._run = trackio.init(
            project=run.path.parent.name, name=run.path.name, config=dict(redact(config)), resume="allow", embed=False
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._trackio.finish()


def _kept_id(path: Path, make: Callable[[], str]) -> str:
    # Kept in the run directory, so that a resumed run continues the same record.
    if not path.is_file():
        replace_file(path, make().encode())
    return path.read_text().strip()


def _finite(value: Any) -> bool:
    return math.isfinite(float(value))
