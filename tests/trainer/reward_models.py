"""Small reward models as folders: the policy's tokenizer or one of their own, a classifier or a value head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

LOUD = "{% for m in messages %}[{{ m['role'] | upper }}] {{ m['content'] }}\n{% endfor %}"
"""A chat template that writes conversations otherwise than the byte tokenizer's own."""


def write_reward_model(folder: Path, *, seed: int = 0, tokenizer: Any = None, labels: int = 1, **settings: Any) -> Path:
    """An untrained Qwen2 classifier whose scores differ from row to row; with the byte tokenizer if none is given."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    from posttrain.models.embedded import byte_tokenizer

    tokenizer = tokenizer or byte_tokenizer()
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "max_position_embeddings": 512,
        "pad_token_id": tokenizer.pad_token_id,
        "num_labels": labels,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2ForSequenceClassification(Qwen2Config(**{**shape, **settings})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def other_tokenizer() -> Any:
    """The byte tokenizer with its ids in another order, and a chat template of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    core = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<pad>", special=True), AddedToken("<eos>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = LOUD
    return tokenizer
