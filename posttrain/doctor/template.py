"""The chat template: has a generation prompt, ends turns with an end token, and gives the same text every time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from posttrain.data.chat import ignored_template_settings
from posttrain.doctor.case import Case
from posttrain.doctor.report import ERROR, NOTE, WARNING, Finding
from posttrain.errors import UserError
from posttrain.models.loading import end_token_ids

AREA = "template"
_CLOCK = re.compile(r"strftime_now\(\s*['\"](.+?)['\"]\s*\)")
_WORD = "Xyzzy"  # an answer that no template contains


def check_template(case: Case) -> Iterator[Finding]:
    try:
        tokenizer = case.tokenizer
    except UserError as error:
        yield Finding(ERROR, AREA, str(error), case.where(f"{case.tree.model}.path"))
        return
    yield from _vocabulary(case, tokenizer)
    if not getattr(tokenizer, "chat_template", None):
        case.report.fact(AREA, "The tokenizer has no chat template: prompts are used as they are.")
        yield from _ends(case, tokenizer, None)
        return
    where = template_name(case)
    yield from _generation_prompt(case, where)
    data = case.config.data
    for what in ignored_template_settings(tokenizer, data.system_prompt, data.apply_chat_template_kwargs):
        yield Finding(WARNING, AREA, what, where, "take the setting out, or take a template that reads it")
    yield from _clock(case, where)
    yield from _ends(case, tokenizer, where)
    yield from _prefix(case, where)


def template_name(case: Case) -> str:
    return f"the chat template of {case.model.tokenizer_path or case.model.path}"


def _render(case: Case, *turns: str, generation: bool = False) -> str | None:
    # Turns alternate between user and assistant; None if the template rejects them.
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(turns)]
    options = {**case.config.data.apply_chat_template_kwargs, "add_generation_prompt": generation}
    try:
        return str(case.tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception:  # templates raise any error; for real prompts the check of the data reports it
        return None


def refuses_all(case: Case) -> bool:
    """Whether the template fails on the simplest prompt, so that its error on a row is its own fault."""
    return _render(case, "1 + 1 = ?", generation=True) is None


def _generation_prompt(case: Case, where: str) -> Iterator[Finding]:
    plain, asked = _render(case, "1 + 1 = ?"), _render(case, "1 + 1 = ?", generation=True)
    if plain is None or asked is None:
        if not any((found.level, found.area) == (ERROR, AREA) for found in case.report.findings):
            yield Finding(WARNING, AREA, "The chat template refuses a conversation of one user turn.", where)
        return
    if plain == asked:
        what = "The chat template writes no generation prompt: nothing tells the model that it is to answer."
        do = "add `{% if add_generation_prompt %}...{% endif %}` with the beginning of an assistant's turn at its end"
        yield Finding(WARNING, AREA, what, where, do)
    else:
        added = asked[len(plain) :] if asked.startswith(plain) else asked[-40:]
        case.report.fact(AREA, f"A prompt ends with {added!r}, where the model's answer begins.")


def _clock(case: Case, where: str) -> Iterator[Finding]:
    first, second = (_render(case, "1 + 1 = ?", generation=True) for _ in range(2))
    if first != second:
        what = (
            "The chat template does not give the same text for the same prompt twice: the same row is another prompt "
        )
        what += "each time, and a run cannot be repeated."
        yield Finding(WARNING, AREA, what, where, "take the clock (or whatever changes) out of it")
        return
    formats = _CLOCK.findall(str(case.tokenizer.chat_template))
    if any(datetime.now().strftime(text) in (first or "") for text in formats):
        what = "The chat template writes today's date into every prompt: the same command gives other prompts tomorrow."
        yield Finding(NOTE, AREA, what, where, "data.apply_chat_template_kwargs can fix it, where the template asks")


def _end_ids(case: Case) -> tuple[int, ...]:
    # Ids that end a response: of the tokenizer, config.json and generation_config.json.
    from transformers import GenerationConfig

    found: set[int] = set()
    settings: list[Any] = [case.model_config]
    folder = case.model_folder
    if folder is not None and (folder / "generation_config.json").is_file():
        settings.append(GenerationConfig.from_pretrained(str(folder)))
    for one in settings:
        value = getattr(one, "eos_token_id", None)
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return end_token_ids(case.tokenizer, found)


def _ends(case: Case, tokenizer: Any, where: str | None) -> Iterator[Finding]:
    ends = _end_ids(case)
    names = ", ".join(str(tokenizer.convert_ids_to_tokens(token)) for token in ends)
    if not ends:
        what = "There is no end token (eos_token of the tokenizer, eos_token_id of config.json): no response would end "
        what += "before its limit."
        do = "name the token that ends a turn as eos_token"
        yield Finding(WARNING, AREA, what, where or str(case.model.path), do)
        return
    case.report.fact(AREA, f"A response ends with {names}.")
    text = _render(case, "1 + 1 = ?", _WORD) if where else None
    if text is None or _WORD not in text:
        return
    tail = text[text.index(_WORD) + len(_WORD) :]
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"]
    stop = list(case.config.actor_rollout_ref.rollout.stop) if case.is_rl else []
    if not set(ids) & set(ends) and not any(word in tail for word in stop):
        shown = repr(tail.strip() or tail)
        what = f"An assistant's turn ends with {shown}, which is no end token ({names}): "
        what += "responses would go on to their limit." if case.is_rl else "the model would not learn to stop."
        do = "name that token as eos_token (tokenizer_config.json) and eos_token_id (generation_config.json)"
        do += ", or add it to actor_rollout_ref.rollout.stop" if case.is_rl else ""
        yield Finding(WARNING, AREA, what, where or "", do)


def _prefix(case: Case, where: str) -> Iterator[Finding]:
    # Whether earlier turns keep their text when the conversation continues.
    thought = f"<think>hm</think>{_WORD}"
    before, after = _render(case, "1 + 1 = ?", thought), _render(case, "1 + 1 = ?", thought, "Sure?")
    if before is None or after is None or after.startswith(before.rstrip()):
        case.report.fact(AREA, "What was written stays as it is when a conversation continues (prefix-stable).")
        return
    several = not case.is_rl and any(_turns(case, row) > 1 for row in case.rows.get("train", [])[:100])
    what = "The chat template rewrites earlier turns when a conversation continues (such as their <think> parts)."
    if several:
        what += " Conversations with several answers become one row per answer: an epoch has more rows than the file."
    level = WARNING if several else NOTE
    do = "if that is not meant, take a template that keeps earlier turns (model.tokenizer_path)" if several else ""
    yield Finding(level, AREA, what, where, do)


def _turns(case: Case, row: dict[str, Any]) -> int:
    key = case.config.data.multiturn.messages_key if hasattr(case.config.data, "multiturn") else "messages"
    messages = row.get(key)
    return sum(m.get("role") == "assistant" for m in messages) if isinstance(messages, list) else 0


def _vocabulary(case: Case, tokenizer: Any) -> Iterator[Finding]:
    # Only tokens of real text count: many tokenizers have a few ids beyond the vocabulary that no text uses.
    size = getattr(case.model_config.get_text_config(), "vocab_size", None)
    text = _render(case, "1 + 1 = ?", generation=True) if getattr(tokenizer, "chat_template", None) else "1 + 1 = ?"
    rows = [text or "", *(str(row.get(case.config.data.prompt_key, "")) for row in case.rows.get("train", [])[:100])]
    largest = max(token for ids in tokenizer(rows, add_special_tokens=False)["input_ids"] for token in [*ids, 0])
    if size and largest >= size:
        what = f"The tokenizer gives token {largest}, but the model's vocabulary holds {size}: it is another model's "
        what += "tokenizer, or the model's config.json is wrong."
        key = f"{case.tree.model}.path"
        yield Finding(ERROR, AREA, what, case.where(key), "give the tokenizer that belongs to the model")
