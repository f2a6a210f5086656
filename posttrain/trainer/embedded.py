"""Prepares the embedded default: sums as data, and the small model warmed up on them by SFT.

How fast the sums are learnt depends on the initial weights and on the processor's rounding: after a fixed number of
steps one model knew a thirtieth of them and another most. So the warm-up ends by validation: when the model answers
half of the sums that it is not shown. Made once per machine and kept under `$POSTTRAIN_CACHE` (default
`~/.cache/posttrain`), in a folder named by the recipe.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from posttrain.cache import cache_folder, writing_cache
from posttrain.config.root import OptimConfig
from posttrain.data.chat import TrainedRow
from posttrain.data.recipes.arithmetic import arithmetic_rows, write_files
from posttrain.engine.base import EngineSettings, TrainEngine
from posttrain.engine.torch_engine import TorchEngine
from posttrain.models.embedded import SHAPE, build_model, byte_tokenizer
from posttrain.models.loading import fuse_and_prove, silence_progress_bars
from posttrain.tracking.progress import Progress, say
from posttrain.trainer.supervised.tasks import SFTTask, sft_batch
from posttrain.workers.supervised import sft_step

# `withheld` training rows are kept from the warm-up; it ends when `until` of them are right, or after `max_steps`.
RECIPE: dict[str, Any] = {
    "version": 5,
    "shape": SHAPE,
    "max_operand": 50,
    "val_size": 200,
    "sft_batch_size": 256,
    "lr": 3e-3,
    "withheld": 200,
    "until": 0.5,
    "max_steps": 400,
    "seed": 0,
}
CHECK_EVERY = 4

Pair = tuple[Sequence[int], Sequence[int]]


def embedded_folder() -> Path:
    """Where the embedded model (`model/`) and data (`train.json`, `test.json`) lie, or will lie."""
    name = hashlib.sha256(json.dumps(RECIPE, sort_keys=True).encode()).hexdigest()[:12]
    return cache_folder() / f"embedded-{name}"


@writing_cache()
def ensure_embedded(say: Any, *, model: bool = True) -> Path:
    """The folder with data and (if asked for) model, made now if they are not there yet."""
    folder = embedded_folder()
    if not (folder / "test.json").exists():
        sizes = {"max_operand": RECIPE["max_operand"], "val_size": RECIPE["val_size"], "seed": RECIPE["seed"]}
        write_files(folder, arithmetic_rows(**sizes))
    if model and not (folder / "model" / "config.json").exists():
        share = RECIPE["until"]
        say(f"Making the embedded model once: SFT until {share:.0%} of withheld sums are right, half a minute.")
        _make_model(folder, say)
    return folder


def fill_embedded(
    models: Sequence[Any],
    data: Any,
    *,
    given: bool,
    files: Callable[[Path], Mapping[str, Path]] = SFTTask.embedded_files,
) -> None:
    """Replace `embedded` in these sections, and what was left unset of the first model and of the training rows (unless
    they are `given` in Python), by what posttrain makes itself."""
    wants_model = [role for role in models if role.path == "embedded" or (role is models[0] and not role.path)]
    wants_train = not given and data.train_files in (None, "embedded")
    if not (wants_model or wants_train or data.val_files == "embedded"):
        return
    folder = ensure_embedded(say, model=bool(wants_model))
    for role in wants_model:
        role.path = str(folder / "model")
    paths = files(folder)
    if wants_train:
        data.train_files = str(paths["train"])
    if data.val_files == "embedded":
        data.val_files = str(paths["test"])


def _make_model(folder: Path, say: Any) -> None:
    tokenizer = byte_tokenizer()
    model = fuse_and_prove(build_model(tokenizer, seed=RECIPE["seed"]).eval(), "the embedded model")
    steps, pad = RECIPE["max_steps"], int(tokenizer.pad_token_id)  # pyright: ignore
    optim = OptimConfig(lr=RECIPE["lr"], betas=[0.9, 0.95], lr_warmup_steps=20)
    settings = EngineSettings(device=torch.device("cpu"), optim=optim, total_steps=steps, token_budget=8192)
    pairs = [_pair(tokenizer, row) for row in json.loads((folder / "train.json").read_text())]
    withheld, shown = pairs[: RECIPE["withheld"]], pairs[RECIPE["withheld"] :]
    accuracy = 0.0
    with Progress(steps, label="SFT warm-up, at most") as progress:

        def show(step: int, loss: float) -> bool:
            nonlocal accuracy
            progress.step("", loss=loss, quiet=True)
            if (step + 1) % CHECK_EVERY == 0:
                accuracy = greedy_accuracy(model, withheld, pad)
            return accuracy >= RECIPE["until"]

        loss = fit_pairs(
            TorchEngine(model, settings),
            shown,
            steps=steps,
            batch_size=RECIPE["sft_batch_size"],
            pad_token_id=pad,
            seed=RECIPE["seed"],
            on_step=show,
        )
    silence_progress_bars()
    # Written beside its place and renamed: another process that looks for the model finds all of it or none.
    partial = folder / f".model.{os.getpid()}"
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(folder / "model", ignore_errors=True)
    partial.rename(folder / "model")
    say(f"The embedded model is in {folder / 'model'} (SFT loss {loss:.3f}, {accuracy:.0%} right).")


def _pair(tokenizer: Any, row: dict[str, Any]) -> tuple[list[int], list[int]]:
    messages = [{"role": "user", "content": row["prompt"]}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return prompt, [*tokenizer.encode(row["ground_truth"]), tokenizer.eos_token_id]


def pair_row(pair: Pair) -> TrainedRow:
    """(prompt ids, response ids) as a row whose response tokens are all trained."""
    prompt, response = pair
    return TrainedRow([*prompt, *response], [False] * len(prompt) + [True] * len(response))


@torch.no_grad()
def greedy_accuracy(model: torch.nn.Module, pairs: Sequence[Pair], pad_token_id: int) -> float:
    """Share of pairs whose response is what the model would write greedily: every token is its likeliest next one."""
    batch = sft_batch([pair_row(pair) for pair in pairs], pad_token_id).batch
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    logits = model(**inputs).logits[:, -batch["responses"].shape[1] - 1 : -1]
    right = (logits.argmax(-1) == batch["responses"]) | (batch["response_mask"] == 0)
    return float(right.all(-1).float().mean())


def fit_pairs(
    engine: TrainEngine,
    pairs: Sequence[Pair],
    *,
    steps: int,
    batch_size: int,
    pad_token_id: int,
    seed: int,
    on_step: Callable[[int, float], bool | None] | None = None,
) -> float:
    """`steps` optimizer steps on random batches of `pairs`, fewer if `on_step` says True; gives the last loss."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.zeros(0, dtype=torch.long)
    loss = float("nan")
    for step in range(steps):
        if len(order) < batch_size:
            order = torch.randperm(len(pairs), generator=generator)
        chosen, order = order[:batch_size].tolist(), order[batch_size:]
        loss = sft_step(engine, sft_batch([pair_row(pairs[i]) for i in chosen], pad_token_id))["loss"]
        if on_step is not None and on_step(step, loss):
            break
    return loss
