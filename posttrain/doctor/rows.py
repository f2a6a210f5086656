"""The data on real rows: columns, lengths against limits, dropped, repeated and contradicting rows.

Also prompts in a wrong form: messages as text, a template applied before, the reference answer inside the prompt, or
one reference answer for all rows.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from posttrain.config.schema import lookup
from posttrain.config.trainer import HELD_OUT
from posttrain.data.chat import TemplateError
from posttrain.data.dataset import PromptDataset, describe_held_out, hold_out
from posttrain.data.fields import is_missing
from posttrain.data.own_dataset import read_own_rows
from posttrain.data.rows import RowTable, read_table
from posttrain.data.supervised import PairDataset, SFTDataset
from posttrain.doctor.case import ERROR, NOTE, SPLITS, WARNING, Case, Finding
from posttrain.doctor.conversations import TEMPLATE, check_named_in_rows, refuses_all, template_name
from posttrain.errors import UserError

AREA = "data"
LOOKED_AT = 5_000  # rows of a split that are tokenized, evenly spread over larger files
MANY_DROPPED = 0.1
FEW_DISTINCT = 0.8
Row = dict[str, Any]


def check_rows(case: Case) -> Iterator[Finding]:
    """Read the files and check their rows."""
    held_out: RowTable | None = None
    for split in SPLITS:
        data = case.config.data
        files = data[f"{split}_files"]
        if files is None or (files == HELD_OUT and held_out is None):
            continue
        try:
            taken = held_out if files == HELD_OUT else files
            if case.is_rl and data.custom_cls and files != HELD_OUT:
                taken = read_own_rows(data, split, case.tokenizer)
            table = read_table(taken, limit=int(data[f"{split}_max_samples"]), setting=f"data.{split}_files")
        except UserError as error:
            yield Finding(ERROR, AREA, str(error), case.where(f"data.{split}_files"))
            continue
        if split == "train" and data.val_files == HELD_OUT:
            batch = data.train_batch_size if "data.train_batch_size" in case.resolved.explicit else 1
            table, held_out = hold_out(table, data.prompt_key, most=data.val_max_samples, batch=batch)
            yield Finding(NOTE, AREA, describe_held_out(len(table), len(held_out or ())))
        case.rows[split] = table.rows
        yield from _tokenized(case, split, table)
        yield from _prompts(case, split)
        if case.is_pairs:
            yield from _pairs(case, split)
    yield from _find_repeats(case)
    yield from _find_overlap(case)
    yield from check_named_in_rows(case)


def _tokenized(case: Case, split: str, table: RowTable) -> Iterator[Finding]:
    kinds = {"sft_trainer": SFTDataset, "reward_model_trainer": PairDataset}
    make: Callable[..., Any] = kinds.get(case.tree.main, PromptDataset)
    # A sample from all over the file: tokenizing millions of rows would take longer than a user waits for a check.
    sample = _sample_rows(table, LOOKED_AT)
    try:
        shown = {"tools": case.schemas} if case.is_rl else {}
        data = make(sample, case.tokenizer, case.config.data, split=split, **shown)
    except UserError as error:
        if isinstance(error, TemplateError) and refuses_all(case):
            yield Finding(ERROR, TEMPLATE, str(error), template_name(case), "fix it, or take another tokenizer")
        else:
            yield Finding(ERROR, AREA, str(error), case.where(f"data.{split}_files"))
        return
    share = len(data) / len(sample)
    # The share that the sample keeps, for all rows: the plan of the run counts with it.
    case.counts[split] = int(share * len(table))
    case.datasets[split] = data
    case.report.fact(AREA, _length_words(case, split, data, table, sample))
    for note in data.notes:
        yield Finding(NOTE, AREA, note)
    if share < 1 - MANY_DROPPED:
        limit = "max_prompt_length" if case.is_rl else "max_length"
        what = f"{1 - share:.0%} of the {split} rows would be left out: {' '.join(data.notes[:3])}"
        do = f"raise data.{limit}, or take other rows"
        do += " (the descriptions of the tools count, too)" if case.schemas else ""
        yield Finding(WARNING, AREA, what, case.where(f"data.{limit}"), do)


def _sample_rows(table: RowTable, most: int) -> RowTable:
    if len(table) <= most:
        return table
    at = [place * len(table) // most for place in range(most)]
    return RowTable(
        [table.rows[i] for i in at], [table.file_of[i] for i in at], [table.number_of[i] for i in at], table.files
    )


def _length_words(case: Case, split: str, data: Any, table: RowTable, sample: RowTable) -> str:
    lengths = sorted(_lengths(data))
    limit = case.config.data.max_prompt_length if case.is_rl else case.config.data.max_length
    seen = f" ({len(sample):,} of them looked at)" if len(sample) < len(table) else ""
    columns = ", ".join(dict.fromkeys(name for row in sample.rows[:50] for name in row))
    what = {"sft_trainer": "rows", "reward_model_trainer": "pairs"}.get(case.tree.main, "prompts")
    return (
        f"{split}: {len(table):,} rows{seen} with {columns}; {what} of {lengths[0]} to {lengths[-1]} tokens, half of "
        f"them below {lengths[len(lengths) // 2] + 1} (limit {limit}); {len(sample) - len(lengths)} would be left out."
    )


def _lengths(data: Any) -> list[int]:
    if isinstance(data, PromptDataset):
        return [len(item["prompt_ids"]) for item in data]
    return [len(getattr(row, "ids", None) or row.chosen) for row in data]


def _prompts(case: Case, split: str) -> Iterator[Finding]:
    rows, where = case.rows[split], case.where(f"data.{split}_files")
    prompts = [row.get(case.config.data.prompt_key) for row in rows]
    blank = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str) and prompt and not prompt.strip()]
    if blank:
        what = f"{len(blank)} of {len(rows)} {split} prompts are blank (the first is row {blank[0] + 1})."
        yield Finding(WARNING, AREA, what, where, "remove these rows")
    yield from check_prompts(case, split, prompts, where)
    if not case.is_rl:
        return
    answered = [p for p in prompts if isinstance(p, list) and p and _role(p[-1]) == "assistant"]
    if answered:
        what = f"{len(answered)} of {len(rows)} {split} prompts end with a turn of the assistant: the answer stands in "
        what += "the prompt, and the model is asked to answer again."
        yield Finding(WARNING, AREA, what, where, "let prompts end with the user's turn")
    yield from _truths(case, split, where)


def _truths(case: Case, split: str, where: str) -> Iterator[Finding]:
    from posttrain.rewards.answers import is_prose, read_answer
    from posttrain.rewards.scorers import is_code

    if split not in case.datasets:
        return
    items = list(case.datasets[split])
    yield from check_truths_in_prompts(split, items, where)
    without = [item for item in items if item["ground_truth"] is None or item["ground_truth"] == ""]
    own_reward = bool(case.config.custom_reward_function.path or case.config.reward_model.enable)
    if without and (len(without) < len(items) or not own_reward):
        what = f"{len(without)} of {len(items)} {split} rows have no ground_truth: the reward would get None."
        yield Finding(WARNING, AREA, what, where, "add the column ground_truth to them, or leave them out")
    limit, long = case.config.data.max_response_length, []
    for item in items:
        truth, source = item["ground_truth"], item["data_source"]
        if isinstance(truth, str | int | float) and not is_code(source) and len(str(truth)) > limit:
            answer = read_answer(source, str(truth)) or str(truth)
            if own_reward and answer == truth and is_prose(answer):
                continue  # a judge compares with this solution; no response has to contain it
            if len(case.tokenizer(answer, add_special_tokens=False)["input_ids"]) > limit:
                long.append(item)
    if len(long) > 0.05 * len(items) or _no_room(case, items, limit):
        count = f"{len(long)} of {len(items)} {split} reference answers" if long else "The reference answers"
        what = f"{count} have more tokens than data.max_response_length={limit}: no response could hold them"
        what += "." if long else " and end."
        yield Finding(WARNING, AREA, what, case.where("data.max_response_length"), "raise data.max_response_length")


def _no_room(case: Case, items: Sequence[Any], limit: int) -> bool:
    # Most truths fit only without the end token that must follow.
    if limit > 4:
        return False
    truths = [str(item["ground_truth"]) for item in items if item["ground_truth"] is not None]
    full = sum(len(case.tokenizer(text, add_special_tokens=False)["input_ids"]) + 1 > limit for text in truths)
    return full > len(items) / 2


def _pairs(case: Case, split: str) -> Iterator[Finding]:
    data, rows = case.config.data, case.rows[split]
    pairs = [tuple(_key(row.get(key)) for key in (data.prompt_key, data.chosen_key, data.rejected_key)) for row in rows]
    where = case.where(f"data.{split}_files")
    if same := sum(chosen == rejected for _, chosen, rejected in pairs):
        what = f"In {same} of {len(pairs)} {split} pairs the two answers are the same ({data.chosen_key} is "
        what += f"{data.rejected_key}): they would be left out."
        yield Finding(WARNING, AREA, what, where, "remove them")
    # A pair in both orders says nothing about which answer is better.
    known = set(pairs)
    if both := sum((prompt, rejected, chosen) in known for prompt, chosen, rejected in pairs if chosen != rejected):
        what = f"{both} of {len(pairs)} {split} pairs stand there in both orders: each answer is the better one once."
        yield Finding(WARNING, AREA, what, where, "keep the order that is right")


def _find_repeats(case: Case) -> Iterator[Finding]:
    if case.is_pairs:
        return
    keyed = [(_question_key(case, row), _key(_target(case, row))) for row in case.rows.get("train", [])]
    rows = [(prompt, truth) for prompt, truth in keyed if prompt is not None]
    if not rows:
        return
    where = case.where("data.train_files")
    whole = Counter(rows)
    if len(whole) < FEW_DISTINCT * len(rows):
        what = f"The {len(rows)} training rows are {len(whole)} different ones: the same prompts would come "
        what += f"{len(rows) / len(whole):.2g} times per epoch."
        yield Finding(WARNING, AREA, what, where, "keep each once; trainer.total_epochs repeats them")
    truths: dict[str, set[str]] = {}
    for prompt, truth in whole:
        truths.setdefault(prompt, set()).add(truth)
    ambiguous = [prompt for prompt, several in truths.items() if len(several) > 1]
    if ambiguous and case.is_rl:
        what = (
            f"{len(ambiguous)} training prompts occur with different reference answers (for example "
            f"{ambiguous[0][:60]}): an answer that is right for one row is wrong for the other."
        )
        yield Finding(
            WARNING,
            AREA,
            what,
            where,
            "keep the right reference answer of each, or list all accepted ones",
        )


def _find_overlap(case: Case) -> Iterator[Finding]:
    seen = {_question_key(case, row) for row in case.rows.get("train", [])} - {None}
    val = case.rows.get("val", [])
    shared = sum(_question_key(case, row) in seen for row in val)
    if shared:
        what = f"{shared} of {len(val)} validation prompts are training prompts too: validation would measure "
        what += "memorization."
        do = "remove them from one of the two files"
        yield Finding(WARNING, AREA, what, case.where("data.train_files", "data.val_files"), do)


def _prompt_key(case: Case, row: Row) -> str | None:
    # None if the row has no prompt, which another check reports.
    data = case.config.data
    value = row.get(data.prompt_key)
    if value is None and hasattr(data, "multiturn"):
        value = row.get(data.multiturn.messages_key)
    if is_missing(value) and case.is_pairs:
        both = [row.get(data.chosen_key), row.get(data.rejected_key)]
        value = both if any(not is_missing(answer) for answer in both) else None
    if isinstance(value, list) and len(value) == 1:
        only: Any = value[0]
        value = only["content"] if _role(only) == "user" and "content" in only else value  # the same as the text alone
    return None if is_missing(value) else _key(value)


def _question_key(case: Case, row: Row) -> str | None:
    # Includes what the row gives to tools: the right answer may depend on it.
    prompt, info = _prompt_key(case, row), row.get("extra_info")
    for_tools = info.get("tools_kwargs") if isinstance(info, dict) else None
    return f"{prompt} {_key(for_tools)}" if prompt is not None and for_tools else prompt


def _target(case: Case, row: Row) -> Any:
    if not case.is_rl:
        return row.get(lookup(case.config, "data.response_key")) or row
    nested = row.get("reward_model")
    inside = nested.get("ground_truth") if isinstance(nested, dict) else None
    return next((v for v in (row.get("ground_truth"), inside, row.get("response")) if not is_missing(v)), None)


def _key(value: Any) -> str:
    # Blanks do not make another prompt.
    return " ".join(value.split()) if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _role(message: Any) -> str | None:
    return message.get("role") if isinstance(message, dict) else None


# How the chat templates of well-known model families begin a turn.
MARKERS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "[INST]", "<|user|>", "<|assistant|>", "<|turn>")
# Characters at the end of a prompt, where an appended truth is, and seldom one that is part of a quoted text.
END = 40
ENOUGH = 10  # with so many rows, one truth for all is no coincidence


def check_prompts(case: Case, split: str, prompts: Sequence[Any], where: str) -> Iterator[Finding]:
    """`prompts` as in the file."""
    texts = [_last_text(prompt) for prompt in prompts]
    if spelled := sum(isinstance(prompt, str) and _is_messages(prompt) for prompt in prompts):
        what = f"{spelled} of {len(prompts)} {split} prompts are messages written down as text: the model would "
        what += "read brackets and quotes as the user's words."
        yield Finding(WARNING, AREA, what, where, "store them as lists of objects with role and content")
    if getattr(case.tokenizer, "chat_template", None):
        marked = [text for text in texts if any(marker in text for marker in MARKERS)]
        if len(marked) > len(texts) / 2:
            marker = next(marker for marker in MARKERS if marker in marked[0])
            what = f"{len(marked)} of {len(texts)} {split} prompts hold {marker}: they went through a chat template "
            what += "before, and the tokenizer's own would be applied as well: twice."
            yield Finding(WARNING, AREA, what, where, "store what the user says alone, without the template's marks")


def check_truths_in_prompts(split: str, items: Sequence[Any], where: str) -> Iterator[Finding]:
    """`items` as training has them: prompts with their reference answers."""
    pairs = [(_last_text(item["raw_prompt"]), str(item["ground_truth"])) for item in items]
    pairs = [(text, truth) for text, truth in pairs if truth.strip() and truth != "None"]
    if len(pairs) < ENOUGH:
        return
    truths = {truth for _, truth in pairs}
    if len(truths) == 1:
        what = f"All {len(pairs)} {split} rows have the same reference answer ({pairs[0][1][:40]!r}): one answer to "
        what += "everything would be right."
        yield Finding(WARNING, AREA, what, where, "check whether the reference answer is read from the right column")
        return
    held = sum(_ends_with(text, truth) for text, truth in pairs)
    # How often a prompt ends with another row's truth: short numbers are found in many texts.
    by_chance = sum(_ends_with(text, pairs[i - 1][1]) for i, (text, _) in enumerate(pairs))
    if held > len(pairs) / 2 and by_chance < held / 2:
        what = (
            f"{held} of {len(pairs)} {split} prompts end with their reference answer: the model would learn to copy it."
        )
        yield Finding(WARNING, AREA, what, where, "remove the reference answer from the prompts")


def _ends_with(text: str, truth: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(truth)}(?!\w)", text[-END - len(truth) :]) is not None


def _last_text(prompt: Any) -> str:
    if isinstance(prompt, list) and prompt:
        prompt = prompt[-1].get("content") if isinstance(prompt[-1], dict) else prompt[-1]
    return prompt if isinstance(prompt, str) else ""


def _is_messages(text: str) -> bool:
    if not text.lstrip().startswith("[{"):
        return False
    try:
        found = json.loads(text)
    except ValueError:
        return "'role'" in text and "'content'" in text  # as Python prints it
    return isinstance(found, list) and all(isinstance(one, dict) and {"role", "content"} <= set(one) for one in found)
