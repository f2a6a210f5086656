"""A small vLLM: the part of its interface that the engine uses, decoding with transformers one row at a time.

It has what makes the real one difficult: weights of its own that begin wrong, prompts that are remembered until the
prefix cache is reset, which is refused while requests run, and a cache whose memory must be there.
"""

from __future__ import annotations

import copy
import importlib.machinery
import sys
from dataclasses import dataclass, field, make_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.rollout.vllm.build import VARIABLES
from posttrain.rollout.vllm.settings import VLLM

ENDED = object()  # what ending torch's process group gives
ARGUMENTS = (
    *("model", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"),
    *("tensor_parallel_size", "pipeline_parallel_size", "distributed_executor_backend"),
    *("enable_lora", "max_lora_rank", "max_loras"),
    *("gpu_memory_utilization", "enable_sleep_mode", "block_size", "mm_processor_cache_gb", "compilation_config"),
    *VLLM.fixed,
    *VLLM.on_cpu,
)
"""Of `EngineArgs`: what posttrain gives, and some that users do."""


@dataclass
class SamplingParams:
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list)
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    output_kind: str = "cumulative"


@dataclass(frozen=True)
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False


class BaseLayerWithLoRA:
    def load_weights(self) -> None:
        """New versions have it."""


class UniProcExecutor:
    """What one rank of several answers for itself."""

    def __init__(self) -> None:
        self.configs: list[Any] = []

    def get_kv_cache_specs(self) -> list[Any]:
        return [{"layer 0": "own"}]

    def determine_available_memory(self) -> list[int]:
        return [100]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        self.configs = kv_cache_configs

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return "own tokens"


class ExecutorWithExternalLauncher(UniProcExecutor):
    def determine_available_memory(self) -> list[int]:
        raise AssertionError("it would ask the ranks of other engines, too")


class Stages:
    """The group of one rank of each stage; this rank is in the middle one."""

    world_size = 3
    is_first_rank = False

    def broadcast_object(self, made: Any, src: int) -> Any:
        return "the last stage's tokens" if src == 2 else made


EngineArgs = make_dataclass("EngineArgs", [(name, Any, None) for name in ARGUMENTS])


class Model(torch.nn.Module):
    """Stacked by nothing, and tied as the real one is: `lm_head.weight` of tied models is not asked for."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hf: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()

    supports_lora = True

    def make_empty_intermediate_tensors(self, batch_size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        return torch.zeros(batch_size, 4, dtype=dtype, device=device)

    def load_weights(self, weights: Any) -> None:
        own = self.hf.state_dict()
        for name, weight in weights:
            own[name].copy_(weight)

    def with_adapters(self, folder: str) -> Any:
        """A copy with the adapters of a folder beside it, which are read once."""
        return PeftModel.from_pretrained(copy.deepcopy(self.hf), folder)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.hf.lm_head(hidden)


@dataclass
class _Running:
    name: str
    prompt: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)


class LLMEngine:
    made: list[LLMEngine] = []  # noqa: RUF012

    def __init__(self, args: Any) -> None:
        self.args, self.running, self.remembered, self.asked = args, [], {}, []
        self.model = Model(args.model)
        self.read: Any = None  # the decoder with the adapters that were read last
        runner = SimpleNamespace(get_model=lambda: self.model, kv_caches=[torch.zeros(64)])
        runner.model, runner.intermediate_tensors, runner.max_num_tokens = self.model, None, 8
        runner.model_config, runner.device = SimpleNamespace(dtype=torch.float32), "cpu"
        self.model_executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.vllm_config = SimpleNamespace(
            device_config=SimpleNamespace(device="cpu"), model_config=SimpleNamespace(max_model_len=args.max_model_len)
        )
        self.closed = False
        self.ended_process_group = False
        core = SimpleNamespace(step=self.step, batch_queue=[], step_fn=None)  # as with several stages
        self.engine_core = SimpleNamespace(shutdown=self._shutdown, engine_core=core)
        LLMEngine.made.append(self)

    def _shutdown(self) -> None:
        """As the real one: its last act ends torch's process group, by a function that it finds by name."""
        self.closed = True
        state = sys.modules["vllm.distributed.parallel_state"]
        self.ended_process_group = state.destroy_distributed_environment() is ENDED

    @classmethod
    def from_engine_args(cls, args: Any) -> LLMEngine:
        return cls(args)

    def add_lora(self, request: LoRARequest) -> bool:
        assert self.args.enable_lora and request.load_inplace, "what is held already would not be read again"
        self.read = self.model.with_adapters(request.lora_path)
        return True

    def add_request(
        self, name: str, prompt: Any, params: SamplingParams, lora_request: LoRARequest | None = None
    ) -> None:
        assert (lora_request is not None) == bool(self.args.enable_lora)
        assert lora_request is None or not lora_request.load_inplace, "each step would read its files again"
        assert len(prompt["prompt_token_ids"]) + 1 <= self.args.max_model_len
        assert params.ignore_eos and not params.detokenize, "ends and texts are not vLLM's here"
        self.asked.append(params)
        self.running.append(_Running(name, [*prompt["prompt_token_ids"]], params))

    def abort_request(self, names: list[str]) -> None:
        self.running = [row for row in self.running if row.name not in names]

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        if self.running and not reset_running_requests:
            return False
        self.remembered.clear()
        return True

    def step(self) -> list[Any]:
        cache = self.model_executor.driver_worker.model_runner.kv_caches[0]
        assert cache.untyped_storage().nbytes(), "the cache was given back"
        made = [self._advance(row) for row in self.running[: self.args.max_num_seqs]]
        return [one for one in made if one is not None]

    def _hidden(self, ids: list[int]) -> torch.Tensor:
        held = self.model.hf if self.read is None else self.read.get_base_model()
        return held.model(torch.tensor([ids])).last_hidden_state[0]

    def _advance(self, row: _Running) -> Any:
        prompt_logprobs = None
        if row.params.prompt_logprobs is not None:
            log_p = self.model.compute_logits(self._hidden(row.prompt)).log_softmax(-1)
            pairs = zip(row.prompt[1:], log_p, strict=False)
            prompt_logprobs = [None, *({token: SimpleNamespace(logprob=float(p[token]))} for token, p in pairs)]
        elif not row.tokens and tuple(row.prompt) not in self.remembered:
            self.remembered[tuple(row.prompt)] = self._hidden(row.prompt)[-1]
        ids = [*row.prompt, *row.tokens]
        hidden = self._hidden(ids)[-1] if row.tokens or prompt_logprobs else self.remembered[tuple(ids)]
        token, log_prob = _sampled(self.model.compute_logits(hidden), row)
        row.tokens.append(token)
        reason = "stop" if token in row.params.stop_token_ids else None
        reason = reason or ("length" if len(row.tokens) == row.params.max_tokens else None)
        if reason is not None:
            self.running.remove(row)
        elif row.params.output_kind != "delta":
            return None
        output = SimpleNamespace(token_ids=[token], logprobs=[{token: SimpleNamespace(logprob=log_prob)}])
        output.finish_reason = reason
        return SimpleNamespace(
            request_id=row.name, prompt_token_ids=row.prompt, prompt_logprobs=prompt_logprobs, outputs=[output]
        )


def _sampled(logits: torch.Tensor, row: _Running) -> tuple[int, float]:
    """(token, its log-prob after penalties, temperature and filters), as vLLM's `processed_logprobs` are."""
    params, logits = row.params, logits.float().clone()
    seen = sorted({*row.prompt, *row.tokens})
    penalised = torch.where(
        logits[seen] > 0, logits[seen] / params.repetition_penalty, logits[seen] * params.repetition_penalty
    )
    logits[seen] = penalised
    if params.temperature == 0.0:
        token = int(logits.argmax())
        return token, float(logits.log_softmax(-1)[token])
    logits = logits / params.temperature
    order = logits.sort(descending=True)
    if params.top_k:
        logits[logits < order.values[params.top_k - 1]] = -torch.inf
    p = logits.softmax(-1)
    logits[p < params.min_p * p.max()] = -torch.inf
    p, order = logits.softmax(-1).sort(descending=True)
    if params.top_p < 1.0:
        logits[order[p.cumsum(-1) - p >= params.top_p]] = -torch.inf
    generator = torch.Generator().manual_seed(1000 * int(params.seed or 0) + len(row.tokens))
    token = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
    return token, float(logits.log_softmax(-1)[token])


def install(monkeypatch: Any) -> type[LLMEngine]:
    """`import vllm` gives this one until the test ends, and what an engine sets in the environment ends with it."""
    LLMEngine.made = []
    own = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION")
    for name in (*own, *VARIABLES):
        monkeypatch.setenv(name, "")  # only what it has set does it take back
        monkeypatch.delenv(name)
    parts = {
        "vllm": {
            "EngineArgs": EngineArgs,
            "LLMEngine": LLMEngine,
            "SamplingParams": SamplingParams,
            "ModelRegistry": SimpleNamespace(
                get_supported_archs=lambda: ["Qwen2ForCausalLM"], _try_load_model_cls=lambda kind: Model
            ),
        },
        "vllm.lora.layers": {"BaseLayerWithLoRA": BaseLayerWithLoRA},
        "vllm.lora.request": {"LoRARequest": LoRARequest},
        "vllm.model_executor.models.interfaces": {"supports_lora": lambda kind: kind.supports_lora},
        "vllm.inputs": {},
        "vllm.inputs.engine": {"tokens_input": lambda ids: {"prompt_token_ids": ids}},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {
            "destroy_distributed_environment": lambda: ENDED,
            "get_pp_group": Stages,
        },
        "vllm.v1.executor.uniproc_executor": {"ExecutorWithExternalLauncher": ExecutorWithExternalLauncher},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(DELTA="delta", FINAL_ONLY="final")},
    }
    for name, members in parts.items():
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["vllm.distributed"].parallel_state = sys.modules["vllm.distributed.parallel_state"]  # pyright: ignore
    return LLMEngine
