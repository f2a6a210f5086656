"""Tokenizers with the chat templates that people use, in short forms written for these tests."""

from __future__ import annotations

from typing import Any

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_WITHOUT_PROMPT = CHATML.split("{% if add_generation_prompt")[0]
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' "
    "+ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ '<s>' }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
)
DROPS_THOUGHTS = (  # of all assistant turns but the last
    "{% for m in messages %}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + text + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ALWAYS_DROPS_THOUGHTS = DROPS_THOUGHTS.replace("and not loop.last ", "")
OPENS_THOUGHTS = CHATML.replace("<|im_start|>assistant\\n' }}", "<|im_start|>assistant\\n<think>\\n' }}")
PLAIN = (  # no special tokens at all, and a generation prompt that ends in a space
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
MARKS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<s>",
    "</s>",
)


def tokenizer_with(template: str | None) -> Any:
    """The byte tokenizer with the special tokens of all these templates."""
    from posttrain.models.embedded import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def merging_tokenizer(template: str) -> Any:
    """A BPE tokenizer that merges a space with the word behind it, as those of GPT-2 and Llama 3 do."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    words = ["assistant: yes indeed\nuser: why so\nassistant: because we can\n"] * 20
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<pad>", "<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator(words, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = template
    return tokenizer


def trained_texts(tokenizer: Any, row: Any) -> list[str]:
    """The runs of trained tokens as text."""
    runs: list[list[int]] = []
    before = False
    for token, trained in zip(row.ids, row.trained, strict=True):
        if trained and not before:
            runs.append([])
        if trained:
            runs[-1].append(token)
        before = trained
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]
