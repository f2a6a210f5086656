"""What engines of other packages (`vllm`, `sglang`) share: the model as they are given it, and their contract.

Such an engine holds a copy of the weights, which syncs renew, and takes its memory at once.
"""

from __future__ import annotations

import copy
import gc
import tempfile
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from posttrain.config.rollout import RolloutConfig
from posttrain.errors import UserError, first_line
from posttrain.models.forward import without_adapters
from posttrain.models.lora import has_adapters, merged_state
from posttrain.rollout.base import Output, Request, RolloutEngine, Row, Stage
from posttrain.rollout.engine_kwargs import OUTSIDE
from posttrain.rollout.native.build import cache_limit
from posttrain.rollout.outside_engine import OutsideEngine

Weights = Iterable[tuple[str, torch.Tensor]]

LEAST = 32  # tokens of a row that an engine is made for at least: what proves an engine and a sync must fit
SHARE = 0.5  # of a GPU's memory, where neither a user nor the memory plan has said it
BLOCK = 128  # tokens of the largest block of a cache on a CPU
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class CopyEngine(RolloutEngine):
    """What engines of other packages share: rows under way, and a copy of the weights. `source` gives the weights again
    where they can be read without a sync: then nothing of them is kept while the engine sleeps."""

    title: ClassVar[str]
    """The package, in messages."""
    on_cuda: bool
    longest: int
    """Tokens of the longest row."""

    def __init__(self, decode: Callable[[list[int]], str] | None, source: Callable[[], Weights] | None) -> None:
        self.decode, self.source = decode, source
        self.waiting: deque[Any] = deque()
        self.rows: dict[str, Any] = {}
        self.count = 0
        self.empty = False  # whether the memory of the weights holds none

    # -- requests -------------------------------------------------------------------------------------------------
    def submit(self, request: Request) -> None:
        self.check_request(request)
        whole = len(request.prompt_ids) + request.sampling.max_tokens
        if whole > self.longest:
            raise ValueError(
                f"request {request.id}: its prompt and response may have {whole} tokens, more than the {self.longest} "
                f"that {self.title} was made for"
            )
        self.waiting.append(self._new_row(request))

    @abstractmethod
    def _new_row(self, request: Request) -> Row: ...

    def has_work(self) -> bool:
        return bool(self.waiting or self.rows)

    def running_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows.values())

    def release(self, ids: Iterable[Hashable]) -> None:
        """These engines find a parent's cache by its tokens, and keep it as long as there is room."""

    def abort(self, ids: Iterable[Hashable]) -> list[Output]:
        wanted = set(ids)
        gone = [row for row in (*self.rows.values(), *self.waiting) if row.request.id in wanted]
        self._take_out([row for row in gone if row.name in self.rows])
        self.waiting = deque(row for row in self.waiting if row.request.id not in wanted)
        return [row.output("abort") for row in gone]

    @abstractmethod
    def _take_out(self, rows: Sequence[Any]) -> None:
        """The other package has nothing of these rows when this is over."""

    # -- weights and memory ---------------------------------------------------------------------------------------
    @torch.no_grad()
    def score(self, token_ids: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[torch.Tensor]:
        """They compute log-probs of a prompt only with a cache: where that sleeps it wakes for the call."""
        self.check_awake("weights")
        if self.has_work():
            raise RuntimeError(f"{self.title} scores rows while no requests are under way")
        self._be_ready()
        borrowed = "cache" in self.asleep
        if borrowed:
            self._resume("cache")
        try:
            return self._scored(token_ids, temperature)
        finally:
            if borrowed:
                self._drop("cache")

    @abstractmethod
    def _scored(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[torch.Tensor]: ...

    @abstractmethod
    def _load(self, weights: Weights) -> None: ...

    def _be_ready(self) -> None:
        """The weights are those that they should be."""
        if self.empty:
            assert self.source is not None
            self._load(self.source())

    def _give_back(self) -> None:
        for stage in ("cache", "weights"):
            if stage not in self.asleep:
                self._drop(stage)
        if "weights" not in self.asleep:
            self.empty = self.on_cuda and self.source is not None

    def _take(self, stage: Stage) -> None:
        """Weights that a sync brings are not read before; without one they are, when the cache wakes."""
        self._resume(stage)
        if stage == "cache":
            self._be_ready()

    @abstractmethod
    def _drop(self, stage: Stage) -> None:
        """Gives the memory of a stage back. On a CPU weights stay."""

    @abstractmethod
    def _resume(self, stage: Stage) -> None: ...


@dataclass(frozen=True)
class CopiedModel:
    """A model of which an engine of another package gets a copy."""

    module: torch.nn.Module
    base: Any
    """Without its adapters."""
    kind: str
    """The name of its class."""
    dtype: str
    place: torch.device
    """Where the engine computes."""

    @classmethod
    def of(cls, module: torch.nn.Module, device: torch.device | None) -> CopiedModel | str:
        """Or why no such engine computes with this model."""
        base = without_adapters(module)
        weight = next(base.parameters())
        if weight.dtype not in DTYPES:
            return f"it does not compute in {str(weight.dtype).removeprefix('torch.')}"
        return cls(module, base, type(base).__name__, DTYPES[weight.dtype], device or weight.device)

    @contextmanager
    def starting(self, engine: OutsideEngine, **own: Any) -> Iterator[str]:
        """A folder with the model's settings (`own` replaces some), in which the engine starts while this is open. Its
        errors name the engine."""
        make_room(self.module, self.base, self.place)
        folder = tempfile.TemporaryDirectory(prefix=f"posttrain-{engine.name}-")
        with folder as name, restored_process_state():
            written = written_config(self.base, self.kind)
            for setting, value in own.items():
                setattr(written, setting, value)
            written.save_pretrained(name)
            try:
                yield name
            except (torch.OutOfMemoryError, UserError):
                raise
            except Exception as error:
                named = f"actor_rollout_ref.rollout.name={engine.name}"
                raise UserError(f"{named}: {engine.title} does not start: {error_text(error)}") from error


def engine_words(engine: OutsideEngine, *facts: str) -> str:
    """The name of an engine in the log: its package, version and what else is true of it."""
    version = engine.installed_version() or "of unknown version"
    return f"{engine.name} ({', '.join((version, *facts))})"


def check_installed(engine: str) -> None:
    """Refuses an engine of another package that is not there."""
    known = OUTSIDE.get(engine)
    if known is not None and not known.is_installed():
        named = f"actor_rollout_ref.rollout.name={engine}"
        raise UserError(f"{named}: the package {engine} is not installed in this environment. {known.install}")


def check_arguments(engine: OutsideEngine, config: RolloutConfig, known: Iterable[str]) -> None:
    """Reject engine arguments of the user that the engine cannot take, before anything is loaded."""
    given = engine.given(config.engine_kwargs)
    for what, do in (*engine.faults(given), *engine.unknown(given, known)):
        raise UserError(f"{what} {do}")


def longest_row(module: Any, given: int | None, longest: int | None) -> tuple[int, bool]:
    """(tokens of a row that an engine is made for, whether the model has fewer positions). One that is scored gets a
    token more."""
    positions = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    most = max(given or longest or positions or 0, LEAST) + 1
    return most, bool(positions) and most > positions


def allowed_cache(config: RolloutConfig, kind: str, memory: int, longest: int, per_token: int) -> int:
    """Bytes of a cache that is taken at once: what is set, or what the most rows need of what is allowed."""
    limit = cache_limit(config, kind, memory)
    if config.kv_cache_gb is not None:
        return limit
    return min(limit, config.max_num_seqs * (longest + BLOCK) * per_token)


def written_config(module: Any, kind: str) -> Any:
    """The model's settings as it is here: overridden, unpacked, and untied where adapters have made ends of ties."""
    config = copy.deepcopy(module.config)
    config.architectures = [kind]
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    head = module.get_output_embeddings()
    if head is not None and has_adapters(head):
        config.tie_word_embeddings = False
    return config


def weights_of(module: Any) -> Weights:
    """Under their Hugging Face names, with adapters folded in."""
    state = merged_state(module) if has_adapters(module) else module.state_dict()
    return state.items()


def is_trained(module: torch.nn.Module) -> bool:
    return any(weight.requires_grad for weight in module.parameters())


def make_room(module: torch.nn.Module, base: Any, place: torch.device) -> None:
    """Move a model that is not trained off the GPU: once the engine has its weights, the model only proves them. If the
    engine cannot be used, the caller moves it back."""
    if place.type == "cuda" and not is_trained(module) and not getattr(base, "is_quantized", False):
        module.to("cpu")
        gc.collect()
        torch.cuda.empty_cache()  # the engine looks at what is free


def error_text(error: BaseException) -> str:
    """Its first line; where that only counts what is wrong with an argument, what it is. And what decides its memory,
    where that is what it lacks."""
    said = first_line(error)
    if "validation error" in said:
        said = " ".join(line.strip() for line in str(error).splitlines()[:3])
    lacks = ("free memory", "out of memory", "available memory", "not enough memory", "kv cache")
    if any(lack in str(error).lower() for lack in lacks):
        said += (
            ". Its share of the device is actor_rollout_ref.rollout.gpu_memory_utilization, beside what the trainer "
            "holds there; `posttrain plan` shows both"
        )
    return said


@contextmanager
def restored_process_state() -> Iterator[None]:
    """Restores random states and threads, which building an engine of another package changes."""
    import random

    import numpy as np

    python, arrays, threads = random.getstate(), np.random.get_state(), torch.get_num_threads()
    torch_states = ExitStack()
    torch_states.enter_context(torch.random.fork_rng())
    try:
        yield
    except BaseException:
        # After an illegal access a GPU's random state cannot be set. The engine's own error is what the user needs.
        with suppress(RuntimeError):
            torch_states.close()
        raise
    finally:
        torch_states.close()
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_num_threads(threads)
