"""Loads tokenizers and models from a local folder or a hub id, with errors that say which folder to give."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from posttrain.config.model import ModelConfig
from posttrain.errors import UserError
from posttrain.models.model_files import ModelError, local_or_hub
from posttrain.models.quantized import keep_one_layout, loading_options
from posttrain.models.template_bounds import bound_templates

# Buffers that old folders store and newer code computes, and value heads of other trainers.
_NO_WEIGHTS = re.compile(
    r"(\.|^)(masked_bias|inv_freq|position_ids|attn\.bias|attention\.bias)$|^(v_head|value_head)\."
)


class WeightsError(ModelError):
    """The folder's weights do not match its config.json."""


def check_weights(
    report: Mapping[str, Any], what: str, *, setting: str | None = None, ignore: Callable[[str], bool] | None = None
) -> None:
    """Reject weights that are missing, unknown, or of another shape, by transformers' loading report.

    transformers initializes missing weights randomly and drops unknown ones, and only prints a table of them. With a
    `config.json` of another model, training would go on without an error.

    `ignore` selects names that do not matter here: those of an unused head. `setting` is the key that lets a run
    continue nevertheless.
    """
    missing = [name for name in sorted(report["missing_keys"]) if not (ignore and ignore(name))]
    others = [name for name in sorted(report["unexpected_keys"]) if not _NO_WEIGHTS.search(name)]
    others = [name for name in others if not (ignore and ignore(name))]
    shapes = [
        f"{name} is {tuple(stored)} there and {tuple(wanted)} by config.json"
        for name, stored, wanted in sorted(report["mismatched_keys"])
    ]
    problems = [
        f"it lacks weights, which would begin random ({few(missing)})" if missing else "",
        f"it holds weights that the model has no place for ({few(others)})" if others else "",
        f"weights have another shape ({few(shapes)})" if shapes else "",
    ]
    if not any(problems):
        return
    advice = "Is its config.json that of these weights, and is nothing wrong laid over it (override_config)?"
    if setting is not None:
        advice += f" {setting}=True trains nevertheless."
    wrong = "; ".join(words for words in problems if words)
    raise WeightsError(f"{what}: the folder does not hold the weights of this model: {wrong}.\n  {advice}")


def is_outside_decoder(model: Any) -> Callable[[str], bool]:
    """Return a test for names outside the decoder: those of a head that is unused, or not there yet."""
    prefix = f"{model.base_model_prefix}."
    return lambda name: not name.startswith(prefix)


def not_finite(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of tensors that hold NaN or infinity."""
    return [name for name, weight in named if weight.is_floating_point() and not bool(torch.isfinite(weight).all())]


def few(names: list[str], most: int = 3) -> str:
    """Return `a, b and 5 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64, "float16": torch.float16}


def silence_progress_bars() -> None:
    """Switch off transformers' bar for every load and save; a run has its own."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Resolve `auto`: bfloat16 on CUDA and float32 on CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[name]


def explain_failure(error: Exception, path: str, what: str, setting: str = "model.path") -> ModelError:
    """Convert a library's error to one that says what to do."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    # The class's name is often all that an error says.
    said = [] if isinstance(error, OSError | ValueError) and lines else [type(error).__name__]
    reason = ": ".join([*said, *lines[:1]])
    if Path(path).is_dir():
        return ModelError(
            f"{setting}={path}: {what} could not be loaded: {reason}\n"
            "  Look at the folder's files (config.json, tokenizer.json, *.safetensors), or fetch the model again."
        )
    from huggingface_hub import constants

    offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
    return ModelError(
        f"{setting}={path}: {what} could not be loaded{offline}: {reason}\n"
        f"  Without a reachable hub give a local folder, such as /path/to/{Path(path).name}\n"
        f"  (HF_ENDPOINT names a mirror, HF_TOKEN gives access to private models)."
    )


def load_tokenizer(config: ModelConfig, path: str | None = None):
    """Load the tokenizer of `tokenizer_path` or of the model; it gets a padding token and a bounded chat template."""
    from transformers import AutoTokenizer

    files = ("config.json", "tokenizer_config.json")
    source = local_or_hub(path or config.tokenizer_path or str(config.path), holds=files)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # a wrong file can make the library raise anything
        raise explain_failure(error, source, "the tokenizer") from error
    if tokenizer.pad_token_id is None:  # any token works, because padding is masked everywhere
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return bound_templates(tokenizer, source)


def load_causal_lm(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    path: str | None = None,
    quantization: str | None = None,
    headless: bool = False,
    role: str = "",
):
    """Load a causal LM in `dtype` on `device`, with a proof which forward passes are right (`forward_mode_of`).

    With `quantization`, its linear layers hold 4 bits and compute in `dtype`. `headless`: its head is not used, and the
    folder need not hold one. `role` precedes the keys that errors name.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    silence_progress_bars()
    source = local_or_hub(path or str(config.path))
    options = loading_options(quantization, dtype, device) if quantization else {}
    try:
        settings = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code)
        apply_overrides(settings, config.override_config, "model")
        options |= {"dtype": dtype, "trust_remote_code": config.trust_remote_code}
        model, report = read_weights(AutoModelForCausalLM, source, settings, options)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a wrong file can make the library raise anything
        raise explain_failure(error, source, "the model") from error
    what = f"{role}model.path={source}"
    if not config.allow_other_weights:
        ignore = is_outside_decoder(model) if headless else None
        key = f"{'actor_rollout_ref.' if role else ''}model.allow_other_weights"
        check_weights(report, what, setting=key, ignore=ignore)
    check_finite(model, what)
    keep_one_layout(model)
    return fuse_and_prove((model if quantization else model.to(device)).eval(), what)


def fuse_and_prove(model: Any, what: str, passes: tuple[Callable[..., Any], Callable[..., Any]] | None = None) -> Any:
    """Fuse parts of the model, and find the forward passes that still equal transformers' (`forward_mode_of`).
    `passes`: what computes as transformers does, and what compares the fused passes with that; None: of a causal LM."""
    from posttrain.models import proof
    from posttrain.models.fused_layer import fuse_layers, fuse_norms

    compute_plain, find_mode = passes or (proof.plain_pass, proof.find_forward_mode)
    # Before anything is fused: it is what the fused passes are compared with.
    plain = compute_plain(model, what)
    fuse_norms(model)
    fuse_layers(model)
    without_dropout(model)
    model.forward_mode = find_mode(model, plain, what)
    return model


def apply_overrides(settings: Any, values: Mapping[str, Any], section: str) -> None:
    """Lay `SECTION.override_config` over the model's config.json."""
    for key, value in values.items():
        # transformers takes any name and ignores it, so that a misspelt one would go unnoticed.
        if not hasattr(settings, key):
            raise ModelError(f"{section}.override_config.{key}: the model's config.json knows no such key")
        setattr(settings, key, value)


def read_weights(kind: Any, source: str, settings: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """(the model of a folder, transformers' report, which `check_weights` judges), without the table that it prints.
    `kind` is an auto class of transformers."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    # Weights of other shapes are in the report, to be rejected together with all other problems.
    how = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        return kind.from_pretrained(source, config=settings, **how, **own_attention(settings), **options)
    finally:
        logging.set_verbosity(before)


def check_finite(model: Any, what: str) -> None:
    # Found now: later they would look like a failed update or a failed weight sync.
    if wrong := not_finite(model.named_parameters()):
        raise ModelError(f"{what}: the weights hold NaN or infinity ({few(wrong)}). Give a sound model.")


def without_dropout(model: torch.nn.Module) -> None:
    """Remove dropout: RL compares two passes over the same tokens, so no pass may be random."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # pyright: ignore


def own_attention(settings: Any) -> dict[str, str]:
    # Normally none, so that transformers chooses; only the eager attention implements score caps and sinks. Ours
    # replaces it after the proof.
    plain = bool(getattr(settings, "attn_logit_softcapping", None)) or settings.model_type == "gpt_oss"
    return {"attn_implementation": "eager"} if plain else {}


class Positions(NamedTuple):
    """How far a model's positions reach: up to `limit`, if it has one; `learned` ones can never go further."""

    limit: int | None
    learned: bool


def positions_of(model: Any) -> Positions:
    learned = any(name.endswith(("wpe", "embed_positions")) for name, _ in model.named_modules())
    return Positions(getattr(model.config, "max_position_embeddings", None) or None, learned)


def check_positions(positions: Positions, longest: int, setting: str | None = None) -> str | None:
    """Return a warning if sequences of `longest` tokens exceed what the model was trained for; raise if it cannot."""
    limit = positions.limit
    if not limit or longest <= limit:
        return None
    advice = "lower data.max_length" if setting else "lower one of the two"
    setting = setting or f"data.max_prompt_length + data.max_response_length allow {longest} tokens"
    if positions.learned:
        raise ModelError(f"{setting}, but this model has learned positions for {limit} only; {advice}")
    return f"{setting}, but the model was made for {limit}."


def end_token_ids(tokenizer: Any, of_model: Iterable[int]) -> tuple[int, ...]:
    """Return all ids that end a response: the tokenizer's and those of the model (`model_end_ids`)."""
    own = tokenizer.eos_token_id
    return tuple(sorted({*of_model, *([] if own is None else [own])}))


def model_end_ids(model: Any) -> tuple[int, ...]:
    """Return ids that end a response by a model's config and generation config."""
    found: set[int] = set()
    for settings in (model.config, getattr(model, "generation_config", None)):
        value = getattr(settings, "eos_token_id", None)
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return tuple(sorted(found))


def end_token_note(end_ids: tuple[int, ...], size: int | None) -> str | None:
    """Return a warning if no token that the model can write ends a response; `size` is its vocabulary, if known."""
    if any(size is None or token < size for token in end_ids):
        return None
    found = f"the end tokens {list(end_ids)} are not among the model's {size}" if end_ids else "there is no end token"
    return (
        f"No token ends a response: {found} (eos_token of the tokenizer, eos_token_id of config.json). Every response "
        "goes on to data.max_response_length, unless actor_rollout_ref.rollout.stop ends it."
    )
