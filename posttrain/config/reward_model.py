"""Section `reward_model`: a trained model that scores whole conversations."""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.config.schema import Section
from posttrain.settings import DTYPES, ONE_OR_MORE, at_least, setting


@dataclass
class RewardModelModelConfig(Section):
    """Which model scores, and how conversations reach it."""

    path: str | None = None
    """Folder or hub id: a sequence classifier with one label, or a causal language model with a value head."""
    tokenizer_path: str | None = None
    """Folder or hub id of its tokenizer and chat template, if they do not lie with the model."""
    input_tokenizer: str | None = None
    """Tokenizer that wrote the responses: if set, conversations are always decoded by it and rendered anew; null takes
    the policy's, and does so only where vocabulary or chat template differ."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""
    dtype: str = setting("auto", choices=DTYPES)
    """Compute type of its weights, as for the policy."""


@dataclass
class RewardModelFSDPConfig(Section):
    """Where the reward model's weights lie between its passes."""

    param_offload: bool = False
    """Keep its weights in host memory outside its pass."""


@dataclass
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
    fsdp_config: RewardModelFSDPConfig = field(default_factory=RewardModelFSDPConfig)
