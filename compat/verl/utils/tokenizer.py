"""Tokenizers and processors by their path."""

from __future__ import annotations

from typing import Any


def hf_tokenizer(name_or_path: str, correct_pad_token: bool = True, correct_gemma2: bool = True, **kwargs: Any) -> Any:
    """The tokenizer, with a padding token; Gemma 2's ends a turn with its end-of-turn token."""
    from transformers import AutoTokenizer

    if correct_gemma2 and isinstance(name_or_path, str) and "gemma-2-2b-it" in name_or_path:
        kwargs |= {"eos_token": "<end_of_turn>", "eos_token_id": 107}
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **kwargs)
    if correct_pad_token:
        set_pad_token_id(tokenizer)
    return tokenizer


def set_pad_token_id(tokenizer: Any) -> None:
    """The end token pads where there is no other."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token


def hf_processor(name_or_path: str, **kwargs: Any) -> Any:
    """The processor of a model with images or sound, or None: models of text alone have none."""
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    except Exception as error:  # the library raises whatever a missing or strange file makes it stumble over
        import warnings

        warnings.warn(f"no processor for {name_or_path} ({type(error).__name__}): text only", stacklevel=2)
        return None
    return processor if "Processor" in type(processor).__name__ else None


def normalize_token_ids(tokenized_output: Any) -> list[int]:
    """A plain list of ids from whatever a tokenizer gave for one text."""
    ids = tokenized_output["input_ids"] if hasattr(tokenized_output, "keys") else tokenized_output
    ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    return list(ids[0]) if len(ids) == 1 and isinstance(ids[0], list | tuple) else ids
