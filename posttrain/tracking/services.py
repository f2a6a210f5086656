"""Loggers that are packages of their own: TensorBoard, wandb, MLflow, SwanLab, Trackio.

Each keeps to one interface, `log(step, metrics)` and `close()`, and without a key or an address of a server records
below the run directory, so that nothing leaves the machine unasked. Settings are shown with secrets taken out.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from posttrain.tracking.atomic import replace_file
from posttrain.tracking.redact import redact
from posttrain.tracking.rundir import RunDirectory

Note = Callable[[str], object]
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
        for key, value in _leaves(redact(config)):
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
    """The id of this run directory's record: kept, so that a resumed run continues it."""
    if not path.is_file():
        replace_file(path, make().encode())
    return path.read_text().strip()


def _leaves(value: Any, name: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        return [leaf for key, item in value.items() for leaf in _leaves(item, f"{name}.{key}" if name else str(key))]
    return [(name, value)]


def _finite(value: Any) -> bool:
    return math.isfinite(float(value))
