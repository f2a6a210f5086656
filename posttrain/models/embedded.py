"""The embedded model: a decoder of about a million parameters and a byte-level tokenizer, created here, not downloaded.

Every byte is a token, so any text round-trips; four special tokens delimit the turns of a chat.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

USER, ASSISTANT, SYSTEM, END, PAD = "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|pad|>"

CHAT_TEMPLATE = (
    "{%- if tools -%}{{ '<|system|>Tools:' }}{%- for tool in tools -%}{{ ' ' + tool | tojson }}{%- endfor -%}"
    "{{ '<|end|>' }}{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'tool' -%}"
    "{{ '<|user|><tool_response>' + message['content'] + '</tool_response><|end|>' }}"
    "{%- else -%}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{%- set call = call['function'] or call -%}"
    "{{ '<tool_call>' + {'name': call['name'], 'arguments': call['arguments']} | tojson + '</tool_call>' }}"
    "{%- endfor -%}{{ '<|end|>' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,  # small models learn several times faster from larger weights than the usual 0.02
}


def byte_tokenizer(size: int | None = None):
    """Build a tokenizer whose vocabulary is the 256 bytes and the special tokens.

    With `size`, words of four letters and digits fill the vocabulary. Tokenizing never produces them, but a model with
    random weights and a large vocabulary can sample them.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = (PAD, END, USER, ASSISTANT, SYSTEM)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    alphabet += [_word(number) for number in range((size or 0) - len(alphabet) - len(special))]
    core = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=END, padding_side="left")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _word(number: int) -> str:
    digits = ""
    for _ in range(4):
        number, digit = divmod(number, 36)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[digit] + digits
    return digits


def build_model(tokenizer: Any, *, seed: int = 0, **shape: Any):
    """Build a freshly initialised Qwen2 decoder of `SHAPE` (any entry can be replaced)."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    settings = Qwen2Config(
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **{**SHAPE, **shape},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(settings)


def write_model(folder: Path | str, *, seed: int = 0, **shape: Any) -> Path:
    """Write an untrained embedded model and its tokenizer as a Hugging Face folder."""
    from posttrain.models.loading import silence_progress_bars

    folder = Path(folder)
    silence_progress_bars()
    tokenizer = byte_tokenizer()
    build_model(tokenizer, seed=seed, **shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
