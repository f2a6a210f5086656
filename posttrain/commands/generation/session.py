"""A session: model, tokenizer, prompts and engine of one command, and its pass over the prompts that are left."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from posttrain.checkpoint.folders import HUGGINGFACE, CheckpointError, read_manifest, refuse_run, verify
from posttrain.checkpoint.manager import CheckpointManager
from posttrain.commands.export import adapted_model, stored_lora
from posttrain.commands.generation.files import Parts
from posttrain.commands.generation.loop import Answers, Requests, answer
from posttrain.commands.generation.settings import Settings, described, find_run_of, is_checkpoint
from posttrain.config.model import ModelConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.conversations.opening import check_rows, open_conversations
from posttrain.data.dataset import PromptDataset, PromptItem
from posttrain.data.rows import DataError, RowTable
from posttrain.errors import UserError, first_line
from posttrain.models.loading import (
    ModelError,
    check_positions,
    end_token_ids,
    end_token_note,
    load_causal_lm,
    load_tokenizer,
    local_or_hub,
    model_end_ids,
    positions_of,
    resolve_dtype,
)
from posttrain.rollout.base import Sampling
from posttrain.rollout.engines import build_engine
from posttrain.rollout.outside import check_installed
from posttrain.tracking.console import print_text
from posttrain.trainer.embedded import ensure_embedded
from posttrain.trainer.run.memory import is_out_of_memory
from posttrain.workers.roles import pick_device

MOST_TOKENS = 1024  # of a response where nothing is set


@dataclass
class ModelSource:
    """Where weights and tokenizer come from."""

    name: str  # as the user wrote it
    config: ModelConfig
    checkpoint: Path | None = None  # a checkpoint whose tensors are laid over the model of `config`

    def described(self) -> dict[str, Any]:
        """Which weights these are: the path, and sizes and times of local files."""
        folder = self.checkpoint or Path(str(self.config.path))
        files = sorted(folder.rglob("*")) if folder.is_dir() else []
        weights = [file for file in files if file.suffix in (".safetensors", ".bin", ".distcp")]
        stats = [(str(file.relative_to(folder)), file.stat()) for file in weights]
        path = str(folder.resolve()) if folder.is_dir() else str(self.config.path)
        return {"path": path, "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]}


def find_model(name: str, settings: Settings, say: Any) -> ModelSource:
    """The source that MODEL names; nothing is loaded yet, but a checkpoint's files are verified."""
    model = settings.config.actor_rollout_ref.model
    if name == "embedded":
        return ModelSource(name, replace(model, path=str(ensure_embedded(say) / "model")))
    path = Path(os.path.expandvars(os.path.expanduser(name)))
    if is_checkpoint(name):
        return _find_checkpoint(name, path, model, say)
    refuse_run(path)
    return ModelSource(name, replace(model, path=local_or_hub(name)))


def _find_checkpoint(name: str, path: Path, model: ModelConfig, say: Any) -> ModelSource:
    problems = verify(path)
    if problems:
        raise CheckpointError(f"The checkpoint {path} is damaged and is not loaded: {problems[0]}.")
    files = read_manifest(path)["files"]
    if f"{HUGGINGFACE}/config.json" in files:  # adapters are folded in there, overrides are in its config
        whole = replace(model, path=str(path / HUGGINGFACE), tokenizer_path=None, lora_rank=0, override_config={})
        return ModelSource(name, whole)
    if find_run_of(path) is None or not any(file.startswith("actor/") for file in files):
        raise CheckpointError(
            f"The checkpoint {path} holds no Hugging Face model, and without its run's config.yaml (two folders above) "
            "and an actor's tensors it cannot be loaded. A run writes one with trainer.export_hf=last or all; "
            "`posttrain export` makes one of a supervised run's adapters."
        )
    base = model
    if model.path in (None, "embedded"):
        base = replace(model, path=str(ensure_embedded(say) / "model"))
    return ModelSource(name, base, checkpoint=path)


def load_tokenizer_of(source: ModelSource, *, raw: bool) -> Any:
    """The tokenizer; `raw` takes its chat template away, so that prompts are used as they are."""
    tokenizer = load_tokenizer(source.config)
    if raw:
        tokenizer.chat_template = None
    return tokenizer


def set_lengths(source: ModelSource, settings: Settings) -> None:
    """Fill in lengths that are not set: responses take at most half of the model's positions, prompts the rest."""
    data, given = settings.config.data, settings.given
    positions = read_positions(source) or 2**20
    if "data.max_response_length" not in given:
        data.max_response_length = min(MOST_TOKENS, positions // 2)
    if "data.max_prompt_length" not in given:
        data.max_prompt_length = positions - data.max_response_length
        if data.max_prompt_length < 1:
            raise ModelError(
                f"--max-tokens {data.max_response_length} leaves no room for a prompt: {source.name} has {positions} "
                "positions; lower it"
            )


def read_positions(source: ModelSource) -> int | None:
    """The most tokens of a sequence, by the model's config; None if it has no limit."""
    from transformers import AutoConfig

    try:
        found = AutoConfig.from_pretrained(str(source.config.path), trust_remote_code=source.config.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{source.name}: the model's config.json could not be read: {first_line(error)}") from error
    return getattr(found.get_text_config(), "max_position_embeddings", None)


def load_module(source: ModelSource, device: torch.device, held_on: torch.device | None = None) -> torch.nn.Module:
    """The weights, for the device and on it, unless they are `held_on` another; a checkpoint's adapters are folded in
    (beside a base of 4 bits they stay apart)."""
    model = source.config
    place: dict[str, Any] = {"dtype": resolve_dtype(model.dtype, device), "device": held_on or device}
    if source.checkpoint is None:
        return load_causal_lm(model, **place)
    manager = CheckpointManager(source.checkpoint.parent)
    lora = stored_lora(manager, source.checkpoint)
    if lora is not None:
        advice = "Give the run's model back its folder, or export the checkpoint: posttrain export."
        adapted = adapted_model(manager, source.checkpoint, lora, model, **place, advice=advice)
        return adapted if lora["base"]["quantization"] else adapted.merge_and_unload()
    module = load_causal_lm(model, **place)
    _copy_checkpoint_weights(module, manager, source.checkpoint)
    return module


@torch.no_grad()
def _copy_checkpoint_weights(module: torch.nn.Module, manager: CheckpointManager, checkpoint: Path) -> None:
    stored = manager.describe(checkpoint, "actor")
    weights = {f"model.{name}": weight for name, weight in module.named_parameters()}
    missing = [name for name, weight in weights.items() if stored.get(name, (None,))[0] != weight.shape]
    if missing:
        raise CheckpointError(
            f"The checkpoint {checkpoint} does not fit the model of its run: {missing[0]} is missing or has another "
            "shape. Was the model's folder replaced since?"
        )
    into = {name: torch.empty(stored[name][0], dtype=stored[name][1]) for name in weights}
    manager.load_tensors(checkpoint, "actor", into, partial=True)
    for name, weight in weights.items():
        weight.copy_(into[name])


def say(text: str) -> None:
    """A note to the user; standard output is for results."""
    print_text(text, sys.stderr)


@dataclass
class Speed:
    """What this command generated, and how long it took; parts of earlier commands do not count."""

    responses: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        rate = self.tokens / self.seconds if self.seconds else 0.0
        responses = "1 response" if self.responses == 1 else f"{self.responses:,} responses"
        return f"{responses}, {self.tokens:,} tokens in {self.seconds:.1f} s ({rate:,.0f} tokens/s)"


class Session:
    """Everything that is known before weights are loaded; `run` loads them and generates. Use `with`: tools that the
    model may call are open meanwhile."""

    def __init__(self, name: str, table: RowTable, settings: Settings, *, rewards: bool = False) -> None:
        self.settings, self.config = settings, settings.config
        # Everything that can be wrong is found before weights are loaded, cheapest first.
        check_installed(self.config.actor_rollout_ref.rollout.name)
        self.source: ModelSource = find_model(name, settings, say)
        self.tokenizer = load_tokenizer_of(self.source, raw=settings.raw)
        set_lengths(self.source, settings)
        self.device = pick_device(self.config.trainer.device)
        # Tools and agents are processes: an error in the data below must close them.
        with ExitStack() as opened:
            self.turns = opened.enter_context(open_conversations(self.config, self.tokenizer, self.device, say))
            tools = self.turns.schemas if self.turns else ()
            self.prompts = self._prompts(table, tools)
            check_rows(self.turns, [item["extra_info"] for item in self.prompts])
            self._opened = opened.pop_all()
        self.dropped = len(table) - len(self.prompts)
        self.engine_name, self.speed = "", Speed()
        for note in self.prompts.notes if rewards else self.prompts.prompt_notes:
            say(f"note: {note}")

    def _prompts(self, table: RowTable, tools: Any) -> PromptDataset:
        data = self.config.data
        try:
            return PromptDataset(table, self.tokenizer, data, split="val", tools=tools)
        except DataError as error:
            if "data.max_prompt_length" in self.settings.given or "Raise data.max_prompt_length" not in str(error):
                raise
            raise DataError(
                f"{error} It was not set: it is what the model's positions leave beside --max-tokens "
                f"{data.max_response_length}; a smaller one leaves more."
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._opened.__exit__(*exc)

    def described(self) -> dict[str, Any]:
        """What the samples depend on."""
        model = self.config.actor_rollout_ref
        prompts = hashlib.sha256()  # of token ids: a changed chat template or system prompt changes it, too
        for item in self.prompts:
            prompts.update(json.dumps([item["index"], item["prompt_ids"]]).encode())
        return {
            **described(self.settings),
            "engine": model.rollout.name,
            "dtype": model.model.dtype,
            "model": self.source.described(),
            "prompts": prompts.hexdigest()[:32],
        }

    def run(
        self,
        parts: Parts | None,
        on_prompt: Callable[[PromptItem, Answers], None],
        has_row: Callable[[int], bool] | None = None,
    ) -> None:
        """Answer every prompt that has none in `parts`; each goes to `parts` and to `on_prompt`.

        With `has_row` only the prompts of the rows for which it is true.
        """
        # Prompts that were under way when a command was killed are answered again, with the same seeds.
        finished = set(parts.finished()) if parts is not None else set()
        own = [item for item in self.prompts if has_row is None or has_row(item["index"])]
        todo = [item for item in own if item["index"] not in finished]
        if finished:
            say(f"{len(finished)} of {len(own)} prompts were finished before; going on with the others.")
        if not todo:
            return
        rollout, data = self.config.actor_rollout_ref.rollout, self.config.data
        with explain_out_of_memory(rollout, data.max_response_length):
            self._answer(todo, parts, on_prompt)
        say(str(self.speed))

    def _answer(
        self, todo: list[PromptItem], parts: Parts | None, on_prompt: Callable[[PromptItem, Answers], None]
    ) -> None:
        device, settings = self.device, self.settings
        plan_cache(settings, self.source.config, device, len(todo), say)
        module = load_module(self.source, device).requires_grad_(False)
        rollout, data = self.config.actor_rollout_ref.rollout, self.config.data
        longest = data.max_prompt_length + data.max_response_length
        note = check_positions(positions_of(module), longest)
        if note:
            say(f"note: {note}")
        engine, self.engine_name = build_engine(rollout, module, self.tokenizer, device=device, longest=longest)
        say(f"{self.source.name} on {device}, engine {self.engine_name}")
        by_index = {item["index"]: item for item in todo}
        started = time.perf_counter()
        engine.wake()
        with self._bar(len(todo)) as bar:
            for answers in answer(
                Requests(engine, self._sampling(module), self.turns),
                todo,
                n=settings.n,
                seed=self.config.trainer.seed,
                decode=lambda ids: self.tokenizer.decode(ids, skip_special_tokens=True),
                # Twice what decodes at once: the next prompts are queued when a sequence ends.
                in_flight=2 * max(rollout.max_num_seqs, settings.n),
            ):
                if parts is not None:
                    parts.add(answers)
                on_prompt(by_index[answers.index], answers)
                self.speed.responses += settings.n
                self.speed.tokens += answers.tokens
                self.speed.seconds = time.perf_counter() - started
                bar.set_postfix_str(f"{self.speed.tokens / self.speed.seconds:,.0f} tokens/s", refresh=False)
                bar.update(settings.n)

    def _bar(self, prompts: int) -> Any:
        from tqdm import tqdm

        return tqdm(total=prompts * self.settings.n, unit="response", disable=not sys.stderr.isatty(), file=sys.stderr)

    def _sampling(self, module: Any) -> Sampling:
        end_ids = end_token_ids(self.tokenizer, model_end_ids(module))
        size = getattr(module.config.get_text_config(), "vocab_size", None)
        if not self.config.actor_rollout_ref.rollout.ignore_eos and (note := end_token_note(end_ids, size)):
            say(f"note: {note}")
        return make_sampling(self.settings, end_ids, max_tokens=self.config.data.max_response_length)


def make_sampling(settings: Settings, end_ids: Sequence[int], *, max_tokens: int) -> Sampling:
    """How the settings of a command say that responses are sampled; `end_ids` end them."""
    rollout = settings.config.actor_rollout_ref.rollout
    return Sampling(
        max_tokens=max_tokens,
        temperature=settings.temperature or 1.0,
        greedy=settings.temperature == 0,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        stop_token_ids=() if rollout.ignore_eos else tuple(end_ids),
        stop=tuple(rollout.stop),
    )


def check_target(path: Path, suffixes: tuple[str, ...], *, overwrite: bool) -> None:
    """UserError if the file exists (without `--overwrite`), or has another suffix."""
    if path.suffix not in suffixes:
        raise UserError(f"--out {path}: the suffix decides the format; give {' or '.join(suffixes)}")
    if path.exists() and not overwrite:
        raise UserError(f"--out {path} exists; name another file, or give --overwrite")


Say = Callable[[str], None]


def plan_cache(
    settings: Settings, model: ModelConfig, device: torch.device, prompts: int, say: Say, ranks: int = 1
) -> None:
    """On a CUDA device: unless it is set, the cache may grow to what the model and its passes leave of the
    memory that is free before they are loaded, as another process (a run, say) may hold the rest. What is sampled does
    not depend on it, and rows that need less take less."""
    if device.type != "cuda":
        return
    from posttrain.planning.budgets import set_cache_size
    from posttrain.planning.memory_plan import Device, is_hopper
    from posttrain.planning.rl import RLPlanner

    config = copy.deepcopy(settings.config)
    config.actor_rollout_ref.model = model
    config.actor_rollout_ref.rollout.n, config.data.train_batch_size = settings.n, prompts
    config.trainer.n_gpus_per_node, config.trainer.nnodes = ranks, 1  # a checkpoint's run may have had more
    if config.actor_rollout_ref.rollout.engine_size != ranks:
        config.actor_rollout_ref.rollout.tensor_model_parallel_size = ranks
        config.actor_rollout_ref.rollout.pipeline_model_parallel_size = 1
    config.actor_rollout_ref.rollout.n_workers = config.actor_rollout_ref.rollout.colocated_workers = 0
    try:
        free = Device("cuda", free_bytes(device), "what is free of the GPU", is_hopper(device))
        set_cache_size(config, free, RLPlanner().plan_generation)
    except Exception as error:  # a model whose code cannot be counted can generate nevertheless
        say(f"note: No memory plan could be made, so that defaults stay as they are: {first_line(error)}")
    chosen, rollout = config.actor_rollout_ref.rollout, settings.config.actor_rollout_ref.rollout
    rollout.kv_cache_gb = chosen.kv_cache_gb
    if rollout.gpu_memory_utilization is None and chosen.gpu_memory_utilization is not None:
        whole = torch.cuda.get_device_properties(device).total_memory  # vLLM's share is of this
        rollout.gpu_memory_utilization = chosen.gpu_memory_utilization * free_bytes(device) / whole


def free_bytes(device: torch.device) -> int:
    """Free memory of a CUDA device."""
    return torch.cuda.mem_get_info(device)[0]


@contextmanager
def explain_out_of_memory(rollout: RolloutConfig, max_tokens: int) -> Iterator[None]:
    """Inside, an out-of-memory error becomes a UserError that names the settings that lower memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"Out of memory: {first_line(error)}\n  What lowers it, with the present values:\n"
            f"  actor_rollout_ref.rollout.max_num_seqs={rollout.max_num_seqs} (responses at once)\n"
            f"  actor_rollout_ref.rollout.kv_cache_gb={rollout.kv_cache_gb}, --max-tokens {max_tokens}\n"
            "  The same command continues from what is finished."
        ) from error
