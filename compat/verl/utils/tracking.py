"""`Tracking(project, experiment, backends).log(metrics, step)`: where a loop of your own sends its metrics."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar


class _Console:
    def log(self, data: dict[str, Any], step: int) -> None:
        shown = {name: value for name, value in data.items() if isinstance(value, int | float)}
        print(" - ".join([f"step:{step}", *(f"{name}:{value}" for name, value in shown.items())]), flush=True)

    def finish(self) -> None:
        """Nothing is open."""


class _File:
    """A line of JSON per step, in VERL_FILE_LOGGER_PATH or under VERL_FILE_LOGGER_ROOT."""

    def __init__(self, project: str, experiment: str) -> None:
        root = Path(os.environ.get("VERL_FILE_LOGGER_ROOT", "."))
        path = Path(os.environ.get("VERL_FILE_LOGGER_PATH") or root / project / f"{experiment}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("w", encoding="utf-8")

    def log(self, data: dict[str, Any], step: int) -> None:
        self.file.write(json.dumps({"step": step, "data": data}, default=float) + "\n")
        self.file.flush()

    def finish(self) -> None:
        self.file.close()


class _TensorBoard:
    """Events in TENSORBOARD_DIR, or tensorboard_log/."""

    def __init__(self, project: str, experiment: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = os.environ.get("TENSORBOARD_DIR") or os.path.join("tensorboard_log", project, experiment)
        print(f"Saving tensorboard log to {folder}.")
        self.writer = SummaryWriter(folder)

    def log(self, data: dict[str, Any], step: int) -> None:
        for name, value in data.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self.writer.close()


class _Package:
    """wandb, swanlab, trackio, mlflow: packages with `log`, opened in their own way."""

    def __init__(self, module: Any, log: Any, finish: Any) -> None:
        self.module, self._log, self._finish = module, log, finish

    def log(self, data: dict[str, Any], step: int) -> None:
        self._log(data, step=step)

    def finish(self) -> None:
        self._finish()


def _wandb(project: str, experiment: str, config: Any) -> _Package:
    import wandb  # pyright: ignore

    wandb.init(project=project, name=experiment, entity=os.environ.get("WANDB_ENTITY"), config=config)
    return _Package(wandb, wandb.log, wandb.finish)


def _swanlab(project: str, experiment: str, config: Any) -> _Package:
    import swanlab  # pyright: ignore

    if os.environ.get("SWANLAB_API_KEY"):
        swanlab.login(os.environ["SWANLAB_API_KEY"])
    swanlab.init(project=project, experiment_name=experiment, config=config)
    return _Package(swanlab, swanlab.log, swanlab.finish)


def _mlflow(project: str, experiment: str, config: Any) -> _Package:
    import mlflow  # pyright: ignore

    mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI", "sqlite:////tmp/mlruns.db"))
    mlflow.set_experiment(project)
    mlflow.start_run(run_name=experiment)
    renamed = lambda data, step: mlflow.log_metrics({k.replace("@", "_at_"): v for k, v in data.items()}, step=step)  # noqa: E731
    return _Package(mlflow, renamed, mlflow.end_run)


def _trackio(project: str, experiment: str, config: Any) -> _Package:
    import trackio  # pyright: ignore

    trackio.init(project=project, name=experiment, config=config)
    return _Package(trackio, lambda data, step: trackio.log(data, step=step), trackio.finish)


_BACKENDS: dict[str, Any] = {
    "console": lambda project, experiment, config: _Console(),
    "file": lambda project, experiment, config: _File(project, experiment),
    "tensorboard": lambda project, experiment, config: _TensorBoard(project, experiment),
    "wandb": _wandb,
    "tracking": _wandb,
    "swanlab": _swanlab,
    "mlflow": _mlflow,
    "trackio": _trackio,
}


class Tracking:
    """Sends metrics to the named backends. (A run of posttrain's own loop logs by itself: trainer.logger.)"""

    supported_backend: ClassVar = list(_BACKENDS)

    def __init__(
        self, project_name: str, experiment_name: str, default_backend: str | list[str] = "console", config: Any = None
    ) -> None:
        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        for name in names:
            assert name in _BACKENDS, f"{name} is not supported; known are {', '.join(_BACKENDS)}"
        self.logger = {name: _BACKENDS[name](project_name, experiment_name, config) for name in names}
        self._finished = False

    def log(self, data: dict[str, Any], step: int, backend: Any = None) -> None:
        """To all backends, or to those named."""
        for name, logger in self.logger.items():
            if backend is None or name in backend:
                logger.log(data=data, step=step)

    def finish(self, exit_code: int = 0) -> None:
        """Closes them, once."""
        if not self.__dict__.get("_finished", True):
            self._finished = True
            for logger in self.logger.values():
                logger.finish()

    def __del__(self) -> None:
        self.finish()


class ValidationGenerationsLogger:
    """Responses of a validation as a table of wandb; nothing elsewhere (runs of posttrain keep theirs in samples/)."""

    def __init__(self, project_name: str | None = None, experiment_name: str | None = None) -> None:
        self.project_name, self.experiment_name = project_name, experiment_name

    def log(self, loggers: Any, samples: list[Any], step: int) -> None:
        if "wandb" not in loggers:
            return
        import wandb  # pyright: ignore

        table = wandb.Table(columns=["step", "input", "output", "score"], data=[[step, *row[:3]] for row in samples])
        wandb.log({"val/generations": table}, step=step)
