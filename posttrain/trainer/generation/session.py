"""A session: model, tokenizer, prompts and engine of one command, and its pass over the prompts that are left."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from posttrain.conversations.opening import check_agent_names, open_conversations
from posttrain.data.dataset import PromptDataset, PromptItem
from posttrain.data.rows import DataError, RowTable
from posttrain.errors import UserError
from posttrain.models.loading import (
    check_positions,
    end_token_ids,
    end_token_note,
    model_end_ids,
    positions_of,
)
from posttrain.rollout.base import Sampling
from posttrain.rollout.engines import build_engine
from posttrain.rollout.outside import check_installed
from posttrain.tracking.terminal_text import print_text
from posttrain.trainer.generation.asking import Asking
from posttrain.trainer.generation.loop import Answers, answer
from posttrain.trainer.generation.memory import memory_words, settle_generation
from posttrain.trainer.generation.model import (
    ModelSource,
    find_model,
    fit_lengths,
    load_module,
    load_tokenizer_of,
)
from posttrain.trainer.generation.parts import Parts
from posttrain.trainer.generation.settings import Settings, described
from posttrain.trainer.generation.workers import Share
from posttrain.workers.roles import pick_device


def say(text: str) -> None:
    """A note to the user; standard output is for results."""
    print_text(text, sys.stderr)


@dataclass
class Speed:
    """What was generated now, and in which time; earlier parts do not count."""

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
        check_installed(self.config.actor_rollout_ref.rollout.name)
        self.source: ModelSource = find_model(name, settings, say)
        self.tokenizer = load_tokenizer_of(self.source, raw=settings.raw)
        fit_lengths(self.source, settings)
        self.device = pick_device(self.config.trainer.device)
        with ExitStack() as opened:
            self.turns = opened.enter_context(open_conversations(self.config, self.tokenizer, self.device, say))
            tools = self.turns.schemas if self.turns else ()
            self.prompts = self._prompts(table, tools)
            check_agent_names(self.turns, self.prompts.column("agent_name"))
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
                f"{error} Nobody set it: it is what the model's positions leave beside --max-tokens "
                f"{data.max_response_length}; a smaller one leaves more."
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._opened.__exit__(*exc)

    def described(self) -> dict[str, Any]:
        """What the samples depend on."""
        model = self.config.actor_rollout_ref
        prompts = hashlib.sha256()
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
        self, parts: Parts | None, on_prompt: Callable[[PromptItem, Answers], None], share: Share | None = None
    ) -> None:
        """Answer every prompt (of the share) that has none in `parts`; each goes to `parts` and to `on_prompt`."""
        finished = set(parts.finished()) if parts is not None else set()
        own = [item for item in self.prompts if share is None or share.has(item["index"])]
        todo = [item for item in own if item["index"] not in finished]
        if finished:
            say(f"{len(finished)} of {len(own)} prompts were finished before; going on with the others.")
        if not todo:
            return
        rollout, data = self.config.actor_rollout_ref.rollout, self.config.data
        with memory_words(rollout, data.max_response_length):
            self._answer(todo, parts, on_prompt)
        say(str(self.speed))

    def _answer(
        self, todo: list[PromptItem], parts: Parts | None, on_prompt: Callable[[PromptItem, Answers], None]
    ) -> None:
        device, settings = self.device, self.settings
        settle_generation(settings, self.source.config, device, len(todo), say)
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
                Asking(engine, self._sampling(module), self.turns),
                todo,
                n=settings.n,
                seed=self.config.trainer.seed,
                decode=lambda ids: self.tokenizer.decode(ids, skip_special_tokens=True),
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

    def _sampling(self, module: torch.nn.Module) -> Sampling:
        rollout, settings = self.config.actor_rollout_ref.rollout, self.settings
        end_ids = end_token_ids(self.tokenizer, model_end_ids(module))
        size = getattr(module.config.get_text_config(), "vocab_size", None)  # pyright: ignore
        if not rollout.ignore_eos and (note := end_token_note(end_ids, size)):
            say(f"note: {note}")
        return Sampling(
            max_tokens=self.config.data.max_response_length,
            temperature=settings.temperature or 1.0,
            greedy=settings.temperature == 0,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            repetition_penalty=rollout.repetition_penalty,
            stop_token_ids=() if rollout.ignore_eos else end_ids,
            stop=tuple(rollout.stop),
        )


def check_target(path: Path, suffixes: tuple[str, ...], *, overwrite: bool) -> None:
    """A result is written where nothing is, unless `--overwrite` says so."""
    if path.suffix not in suffixes:
        raise UserError(f"--out {path}: the suffix decides the format; give {' or '.join(suffixes)}")
    if path.exists() and not overwrite:
        raise UserError(f"--out {path} exists; name another file, or give --overwrite")
