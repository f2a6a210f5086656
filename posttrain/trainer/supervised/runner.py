"""From a resolved configuration to a finished supervised run: directory, data, task, loop, and tidy ends."""

from __future__ import annotations

import copy
from typing import Any

import torch

from posttrain.config.resolved import Resolved
from posttrain.models.loading import check_positions, load_tokenizer
from posttrain.planning.batch_sizes import count_steps
from posttrain.tracking.progress import say
from posttrain.trainer.embedded import ensure_embedded
from posttrain.trainer.run.memory import named_stage, plan_memory
from posttrain.trainer.run.process import load_external, opened_run, prepare_torch
from posttrain.trainer.run.result import RunResult
from posttrain.trainer.run.workers import driven_by_one_machine, keep_worker_logs, open_workers
from posttrain.trainer.supervised.loop import SupervisedTrainer
from posttrain.trainer.supervised.tasks import Task
from posttrain.workers.engine_worker import adapter_notes
from posttrain.workers.roles import pick_device


@driven_by_one_machine
def run_supervised(resolved: Resolved, task_class: type[Task], *, data: Any = None, val_data: Any = None) -> RunResult:
    """One whole run. `data` and `val_data` stand in for files."""
    with opened_run(resolved, task_class.stem) as (stack, config, run):
        stored = copy.deepcopy(config)
        load_external(config.model.external_lib, "model.external_lib")
        device = pick_device(config.trainer.device)
        prepare_torch(config.trainer, device)
        _fill_embedded(config, data, task_class)
        tokenizer = load_tokenizer(config.model)
        dataset, held_out = task_class.dataset, config.data.val_files if val_data is None else val_data
        train: Any = dataset(config.data.train_files if data is None else data, tokenizer, config.data, split="train")
        val: Any = None if held_out is None else dataset(held_out, tokenizer, config.data, split="val")
        for note in dict.fromkeys([*train.notes, *(val.notes if val else [])]):
            say(f"note: {note}")
        batch, steps = count_steps(config, len(train))
        if batch < config.data.train_batch_size:
            say(f"note: data.train_batch_size is lowered to the {batch} training rows that there are.")
        plan_memory(config, device, resolved.explicit)
        workers = stack.enter_context(open_workers(config, device, config.model.external_lib, run.logs))
        stack.callback(keep_worker_logs, workers, run.logs)
        parts = {"tokenizer": tokenizer, "train": train, "val": val, "device": device, "workers": workers}
        with named_stage("load"):
            task = task_class(config, **parts, total_steps=steps)
        say(task.describe(train, val, steps))
        _say_model(config, task, device, max(train.longest, val.longest if val else 0))
        trainer = SupervisedTrainer(config, task, run, stored_config=stored)
        trainer.recorder.worker_spans = workers.spans
        trainer.recorder.traces.workers = workers
        return trainer.fit()


def _say_model(config: Any, task: Task, device: torch.device, longest: int) -> None:
    facts = task.group.engine_facts.once()
    share = f", {facts.trained:,} of them trained" * (facts.trained < facts.parameters)
    packed = "packed rows" if facts.packed else "padded rows"
    held = f", its base in 4 bits ({config.model.quantization})" if config.model.quantization else ""
    say(
        f"Model: {config.model.path}, {facts.parameters:,} parameters{share}, {facts.dtype} on {device}{held}, {packed}"
    )
    if facts.engine:
        say(f"Train engine: {facts.engine}")
    for note in adapter_notes(facts, config.model):
        say(f"note: {note}")
    positions = check_positions(facts.positions, longest, f"the longest row has {longest} tokens")
    for note in (facts.note, positions):
        if note:
            say(f"note: {note}")


def _fill_embedded(config: Any, data: Any, task: type[Task]) -> None:
    """Replace `embedded` by the model and the files that posttrain makes itself."""
    wants_model = config.model.path in (None, "embedded")
    wants_train = data is None and config.data.train_files in (None, "embedded")
    if not (wants_model or wants_train or config.data.val_files == "embedded"):
        return
    folder = ensure_embedded(say, model=wants_model)
    if wants_model:
        config.model.path = str(folder / "model")
    files = task.embedded_files(folder)
    if wants_train:
        config.data.train_files = str(files["train"])
    if config.data.val_files == "embedded":
        config.data.val_files = str(files["test"])
