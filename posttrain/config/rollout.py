"""Section `actor_rollout_ref.rollout`: how responses are generated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from posttrain.config.base import Section


@dataclass
class ValSamplingConfig(Section):
    """Sampling in validation."""

    n: int = 1
    """Responses per validation prompt (the k of mean@k, pass@k and maj@k)."""
    do_sample: bool = False
    """Sample; false takes the most likely token."""
    temperature: float = 1.0
    """Temperature when sampling."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with at least this probability."""
    top_k: int = -1
    """Sample from this many most likely tokens; -1 takes all."""


@dataclass
class RolloutConfig(Section):
    """Generation of responses. Example: `actor_rollout_ref.rollout.n=5`."""

    name: str = "native"
    """Rollout engine: `native` (posttrain's own), `hf` (transformers: the oracle), `vllm` (where vLLM is installed);
    `sglang` (where SGLang
    is installed)."""
    n: int = 1
    """Responses per prompt; estimators that compare a group need more than 1 (unset they get 5)."""
    temperature: float = 1.0
    """Sampling temperature; training uses the same one."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with at least this probability."""
    top_k: int = -1
    """Sample from this many most likely tokens; -1 takes all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one."""
    repetition_penalty: float = 1.0
    """Divide the scores of tokens that occurred before by this; 1 switches it off."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a response besides the end-of-sequence token."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token up to the length limit."""
    max_num_seqs: int = 1024
    """Responses decoded side by side."""
    max_num_batched_tokens: int | None = None
    """Tokens computed in one step of the engine; longer prompts are computed in pieces. null is 16384 on a GPU, which
    fewer would leave waiting for the host, and 8192 elsewhere."""
    kv_cache_gb: float | None = None
    """Most memory that the key/value cache may take, in GiB; null is what the memory plan leaves of a GPU, and 30% of
    the memory elsewhere."""
    n_workers: int = 0
    """Workers that only generate, each on a device of its own, while those of `trainer` only train; 0: the same workers
    do both."""
    tensor_model_parallel_size: int = 1
    """Neighbouring workers that hold one rollout engine, each a part of the model's heads and feed-forward columns and
    its cache (`native`)."""
    gpu_memory_utilization: float | None = None
    """Share of the device's memory for the engine; null lets the memory plan choose."""
    multi_turn: dict[str, Any] = field(default_factory=dict)
    """Responses of several turns, in which the model calls tools: `multi_turn=True tools=[calculator]`; what else
    there is to set stands in docs/tools.md."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the rollout engine's own, under its name (`engine_kwargs.vllm`); docs/rollout.md says which."""
    agent: dict[str, Any] = field(default_factory=dict)
    """A function of your own that leads each conversation: `agent=FILE.py:NAME`; what else there is to set stands in
    docs/own_agent.md."""
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)
