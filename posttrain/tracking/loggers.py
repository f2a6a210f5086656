"""Where metrics go: `metrics.jsonl` always, and details on the console and services as `trainer.logger` says.

A logger has `log(step, metrics)` and `close()`. One that cannot start or fails later is named in a note and left out: a
run never ends because of a logger. Only `metrics.jsonl`, which the run's own tools read, must be writable.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from posttrain.registry import Registry
from posttrain.texts import utf8
from posttrain.tracking.diagnosis import stage_shares
from posttrain.tracking.own_console import active
from posttrain.tracking.rundir import RunDirectory
from posttrain.tracking.services import (
    MlflowLogger,
    SwanlabLogger,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
)

Note = Callable[[str], object]


class Logger(Protocol):
    """Receives every metric of every step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlLogger:
    """One JSON object per line, `step` first; floats bitwise, NaN and infinities as text that any reader takes.

    With a clock each line ends with its `time`.
    """

    def __init__(self, path: Path, clock: Callable[[], float] | None = None) -> None:
        self._file, self._clock = path.open("ab"), clock

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if os.fstat(self._file.fileno()).st_nlink == 0:  # deleted: lines written now would be lost
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._file.name)
        line = as_line(step, metrics)
        if self._clock is not None:
            line["time"] = round(self._clock(), 3)
        self._file.write(utf8(json.dumps(line, ensure_ascii=False, allow_nan=False)) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def as_line(step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
    return {"step": step, **{name: _plain(value) for name, value in metrics.items() if name != "step"}}


def read_metrics(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, NaN and infinities as floats; a last line that was cut off is left out."""
    with Path(path).open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield {name: _number(value) for name, value in json.loads(line).items()}


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
    """All loggers of a run as one; a command with `--json` has its lines from here too."""

    def __init__(self, required: Logger, optional: dict[str, Logger], note: Note) -> None:
        self._required, self._optional, self._note = required, optional, note

    def log(self, step: int, metrics: Mapping[str, float], advice: Sequence[Mapping[str, str]] = ()) -> None:
        """`advice`: what the diagnosis said of the step, for readers of `--json`."""
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
    """Words side by side, two blanks apart and before."""
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
