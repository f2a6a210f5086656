"""Sections `custom_reward_function`, `reward` and `reward_model`: what scores a response, and with which limits."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from posttrain.config.schema import Section, section
from posttrain.config.trainer import WITHOUT_RAY, OffloadConfig
from posttrain.settings import DTYPES, LARGEST_SCORE, ONE_OR_MORE, PROCESSES, SCORE, SECONDS, Range, at_least, setting

FACTOR = Range(lambda value: 0 < value <= LARGEST_SCORE, f"above 0 and at most {LARGEST_SCORE:g}")


@section
class SandboxConfig(Section):
    """Limits of one program. Example: `reward.sandbox.timeout_s=2 reward.sandbox.memory_mb=256`."""

    mode: str = setting("kernel", choices=("kernel", "unsafe"))
    """`kernel` isolates programs by namespaces and a filter of system calls; `unsafe` runs them with your rights."""
    timeout_s: float = setting(5.0, range=SECONDS)
    """Seconds that a program may take for all of its tests together."""
    memory_mb: int = setting(512, range=at_least(16))
    """Memory that a program may allocate, all of its processes together."""
    processes: int = setting(16, range=ONE_OR_MORE)
    """Processes and threads that a program may have at a time."""
    disk_mb: int = setting(64, range=ONE_OR_MORE)
    """Size of all files that a program may write; they lie in memory and are gone with it."""
    output_kb: int = setting(1024, range=ONE_OR_MORE)
    """What a program may write to its standard output and error before it is ended."""


@section
class CustomRewardConfig(Section):
    """Your own reward. Example: `custom_reward_function.path=my_reward.py`."""

    path: str | None = setting(None, is_path=True)
    """A Python file, a dotted path to a module or function, or a URL; null scores by `data_source`."""
    name: str | None = setting(None, idle=".path is not set")
    """Function in that file; null takes `compute_score`, or the only public function."""
    reward_kwargs: dict[str, Any] = setting(factory=dict, idle=".path is not set")
    """Further keyword arguments of the function."""


@section
class OverlongBufferConfig(Section):
    """A penalty on training responses that come near the length limit (DAPO)."""

    enable: bool = False
    """Take the penalty from the score."""
    len: int | None = setting(None, range=ONE_OR_MORE, idle=".enable is False")
    """Tokens before the limit over which the penalty grows; null takes a fifth of `data.max_response_length`."""
    penalty_factor: float = setting(1.0, range=FACTOR, idle=".enable is False")
    """Penalty of a response at the limit."""


@section
class RewardPartConfig(Section):
    """One of several rewards. Example: `+reward.functions.form.tags=[think,answer] +reward.functions.form.weight=0.2`.

    It has at most one of path, data_source, tags, pattern and the lengths; with none of them rows are scored by
    their `data_source`.
    """

    weight: float = 1.0
    """What the score is multiplied by; below 0 it is a penalty."""
    needs: str | None = None
    """Another function: this one counts only where that one found the response right."""
    path: str | None = None
    """As in `custom_reward_function`: a file, a dotted path or a URL."""
    name: str | None = None
    """Function in that file."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the function."""
    data_source: str | None = None
    """A built-in scorer for all rows, whatever their own source."""
    tags: list[str] | None = None
    """1 if the response consists of these tags, in their order."""
    pattern: str | None = None
    """1 if this regular expression is found in the response."""
    min_tokens: int | None = None
    """Responses shorter than this score less than 1."""
    free_tokens: int | None = None
    """Responses longer than this score less than 1."""
    max_tokens: int | None = None
    """Responses of this length or longer score 0."""


@section
class RewardConfig(Section):
    """Several rewards, and limits on scoring, which runs in worker processes."""

    functions: dict[str, Any] = field(default_factory=dict)
    """Several rewards by name, summed with their weights; empty takes `custom_reward_function`, or the data source."""
    num_workers: int | None = setting(None, range=PROCESSES)
    """Worker processes on each machine; null takes one per core, at most 8."""
    on_all_machines: bool = setting(True, idle=WITHOUT_RAY)
    """Score on every machine of the run's Ray that has cores; false keeps reward workers on the driver's."""
    timeout_s: float = setting(10.0, range=SECONDS)
    """Seconds that the scoring of one response (or one group) may take."""
    failure_score: float = setting(0.0, range=SCORE)
    """Score of a response whose reward raised, hung or was not a finite number."""
    code_partial_credit: bool = False
    """Give a program the share of tests that it passes, instead of 1.0 for all of them and 0.0 otherwise."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)


@section
class RewardModelModelConfig(Section):
    """Which model scores, and how conversations reach it."""

    path: str | None = setting(None, is_path=True)
    """Folder or hub id: a sequence classifier with one label, or a causal language model with a value head."""
    tokenizer_path: str | None = setting(None, is_path=True)
    """Folder or hub id of its tokenizer and chat template, if they do not lie with the model."""
    input_tokenizer: str | None = setting(None, is_path=True)
    """Tokenizer that wrote the responses: if set, conversations are always decoded by it and rendered anew; null takes
    the policy's, and does so only where vocabulary or chat template differ."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""
    dtype: str = setting("auto", choices=DTYPES)
    """Compute type of its weights, as for the policy."""


@section
class RewardModelConfig(Section):
    """A reward model. Example: `reward_model.enable=True reward_model.model.path=weqweasdas/RM-Gemma-2B`."""

    enable: bool = False
    """Load the model and let its scores be rewards."""
    weight: float = 1.0
    """What the model's score is multiplied by."""
    function_weight: float | None = None
    """What the reward function's score is multiplied by before it is added; null takes 1 if a function is named
    (`custom_reward_function`, `reward.functions`), else 0, so that it is only recorded."""
    micro_batch_size_per_gpu: int | None = setting(None, range=ONE_OR_MORE)
    """Most conversations in one forward pass of a worker; null fills the token budget."""
    forward_max_token_len_per_gpu: int = setting(16384, range=ONE_OR_MORE)
    """Token budget of one packed forward pass of a worker."""
    max_length: int | None = setting(None, range=at_least(2))
    """Most tokens of a conversation; null takes what the model was made for."""
    truncation: str = setting("left", choices=("left", "right", "error"))
    """Which end of a longer one is cut: `left` keeps the response, `right` the prompt; `error` stops the run."""
    model: RewardModelModelConfig = field(default_factory=RewardModelModelConfig)
    fsdp_config: OffloadConfig = field(default_factory=OffloadConfig)
