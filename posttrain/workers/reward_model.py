"""The reward model: conversations as it reads them, and one score for each, on the last token of its response.

Shapes: B rows, R response width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from posttrain.batch.columns import LastTokenColumn
from posttrain.batch.compact import lengths_of
from posttrain.config.model import ModelConfig
from posttrain.config.root import PPOConfig
from posttrain.controller.group import register, to_all, to_first
from posttrain.conversations.untrusted_text import untrusted_text
from posttrain.errors import UserError
from posttrain.models.forward import forward_mode_of, without_adapters
from posttrain.models.loading import ModelError, load_tokenizer, resolve_dtype
from posttrain.models.scorer import score_rows
from posttrain.models.scorer_loading import load_scorer
from posttrain.protocol import DataProto
from posttrain.texts import texts_of
from posttrain.workers.update_plan import by_groups, in_row_order


class Unreadable(Exception):
    """A conversation that the reward model cannot score; the message is recorded with its sample."""


def same_tokenizer(one: Any, other: Any) -> bool:
    """Whether equal ids mean equal text to both, and a conversation is written the same way.

    A special token that only one of them has does not matter: the shared template writes none of it.
    """
    if one.chat_template != other.chat_template:
        return False
    ids, others = one.get_vocab(), other.get_vocab()
    # Vocabularies are compared rather than names: a fine-tuned model often brings its own copy of the tokenizer.
    unshared = ids.keys() ^ others.keys()
    special = {*one.all_special_tokens, *other.all_special_tokens}
    return unshared <= special and all(others.get(token, number) == number for token, number in ids.items())


class Conversations:
    """The policy's samples as the reward model reads them. `rows(data)`: one list of token ids per row, or the reason
    why there is none.

    With one tokenizer and one chat template for both, a row's ids are what the reward model reads. Otherwise the
    response is decoded, joined to the prompt's messages and rendered by the reward model's own template. If the
    response spells a control token of that template, it stays text: it cannot end the response and begin another turn.

    `policy` is the tokenizer that wrote the responses, `own` the reward model's. `renders`: conversations are rendered
    by the reward model's template even where both are the same. `vocabulary` is the number of tokens that the model has
    weights for.
    """

    vocabulary: int | None = None

    def __init__(self, policy: Any, own: Any, *, renders: bool = False, path: str | None = None) -> None:
        self.policy, self.own, self.outside = policy, own, untrusted_text(own)
        self.renders = renders or not same_tokenizer(policy, own)
        if self.renders and policy.chat_template and not own.chat_template:
            raise ModelError(
                f"reward_model.model.path={path}: its tokenizer has no chat template, and conversations must be "
                "rendered anew for it; give a tokenizer folder that has one: reward_model.model.tokenizer_path=FOLDER "
                "(or put chat_template.jinja into the reward model's folder)"
            )

    def rows(self, data: DataProto) -> list[list[int] | Unreadable]:
        """Token ids of prompt and response, end to end, without padding."""
        if not self.renders:
            masks = data.batch["attention_mask"].bool()
            rows = [ids[mask].tolist() for ids, mask in zip(data.batch["input_ids"], masks, strict=True)]
            return [self._known(row) or row for row in rows]
        width = data.batch["responses"].shape[1]
        masks = data.batch["attention_mask"][:, -width:].bool()
        responses = [ids[mask].tolist() for ids, mask in zip(data.batch["responses"], masks, strict=True)]
        texts = texts_of(responses, self.policy)
        return [
            self._row(messages, text) for messages, text in zip(data.non_tensor_batch["raw_prompt"], texts, strict=True)
        ]

    def _row(self, messages: Any, response: str) -> list[int] | Unreadable:
        try:
            row = self.encode(messages, response)
        except Unreadable as error:
            return error
        return self._known(row) or row

    def _known(self, row: list[int]) -> Unreadable | None:
        if self.vocabulary is None or max(row, default=0) < self.vocabulary:
            return None
        return Unreadable(
            f"token {max(row)} of the conversation is not among the {self.vocabulary} that the reward model knows; its "
            "tokenizer does not belong to it (reward_model.model.tokenizer_path)"
        )

    def encode(self, messages: Any, response: str) -> list[int]:
        """Ids of one conversation; a template writes its special tokens itself, so none are added to its output."""
        if not self.own.chat_template:  # neither has one: the prompt is plain text, and the response continues it
            return self.own(str(messages[-1]["content"]) + response)["input_ids"]

        def render(said: Any) -> str:
            conversation = [*messages, *said]
            return str(self.own.apply_chat_template(conversation, tokenize=False, add_generation_prompt=False))

        try:
            return self.outside.ids([{"role": "assistant", "content": response}], render)
        except Exception as error:  # templates raise errors of their own making, such as an unsupported role
            raise Unreadable(f"the reward model's chat template refused the conversation: {error}") from error


class RewardModelWorker:
    """Scores conversations with a frozen model. `tokenizer` is the policy's, which wrote the responses."""

    def __init__(self, config: PPOConfig, tokenizer: Any, device: torch.device) -> None:
        self.config, self.policy_tokenizer, self.device = config.reward_model, tokenizer, device

    @register(to_all)
    def init_model(self) -> None:
        """Load tokenizer and weights; models that cannot score conversations are rejected here."""
        model = self.config.model
        own = load_tokenizer(self._source())
        written_by = self.policy_tokenizer
        if model.input_tokenizer is not None:
            written_by = load_tokenizer(self._source(), model.input_tokenizer)
        renders = model.input_tokenizer is not None
        self.conversations = Conversations(written_by, own, renders=renders, path=model.path)
        self.module = load_scorer(
            str(model.path),
            self.device,
            resolve_dtype(model.dtype, self.device),
            pad_token_id=own.pad_token_id,
            trust_remote_code=model.trust_remote_code,
            setting="reward_model.model.path",
        )
        # Frozen: no activations are kept for a backward pass.
        self.module.requires_grad_(False)
        settings = without_adapters(self.module).config.get_text_config()
        self.conversations.vocabulary = settings.vocab_size
        made_for = getattr(settings, "max_position_embeddings", None)
        self.longest = min(self.config.max_length or made_for or math.inf, made_for or math.inf)
        self._offload()

    def _source(self) -> ModelConfig:
        model = self.config.model
        return ModelConfig(
            path=model.path, tokenizer_path=model.tokenizer_path, trust_remote_code=model.trust_remote_code
        )

    @register(to_first)
    def notes(self) -> list[str]:
        """Notes for the user about the loaded model."""
        kind = type(without_adapters(self.module)).__name__
        how = "rendered by its own chat template" if self.conversations.renders else "passed as the policy's token ids"
        limit = (
            "" if math.isinf(self.longest) else f"; more than {self.longest} tokens are cut ({self.config.truncation})"
        )
        about_rows = forward_mode_of(self.module).note
        summary = f"Reward model: {kind} of {self.config.model.path}; conversations are {how}{limit}."
        return [summary, *([about_rows] if about_rows else [])]

    @register(to_first)
    def check_prompt(self, messages: Any) -> None:
        """Rejects a template that cannot render the data's conversations, before anything is generated."""
        if self.conversations.renders:
            try:
                self.conversations.encode(messages, "")
            except Unreadable as error:
                roles = ", ".join(message["role"] for message in messages)
                raise UserError(
                    f"reward_model.model.path={self.config.model.path}: {error}\n  The first prompt has the roles "
                    f"{roles}; change the data (or data.system_prompt), or give another tokenizer and template by "
                    "reward_model.model.tokenizer_path=FOLDER"
                ) from error

    @register(by_groups, in_row_order)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """`rm_scores` (B, R), each score on its response's last token; `rm_error` and `rm_truncated` of each row."""
        rows = self.conversations.rows(data)
        readable = [number for number, row in enumerate(rows) if isinstance(row, list)]
        whole = [row for row in rows if isinstance(row, list)]
        scores_B = torch.zeros(len(rows))
        if whole:  # a rank may have no readable conversation: it loads nothing onto its device then
            with self._on_device():
                scores_B[readable] = score_rows(
                    self.module,
                    [self._truncate(row) for row in whole],
                    token_budget=self.config.forward_max_token_len_per_gpu,
                    max_rows=self.config.micro_batch_size_per_gpu,
                )
        errors = [str(row) if isinstance(row, Unreadable) else None for row in rows]
        for row in (~scores_B.isfinite()).nonzero().flatten().tolist():
            errors[row] = f"the reward model gave {float(scores_B[row])}"
        # Counted and reported: a score of half a conversation is easily mistaken for one of it all.
        truncated = [isinstance(row, list) and len(row) > self.longest for row in rows]
        # A score that is no number is recorded as an error; NaN in the tensor would spread through the whole batch.
        scores_B, width = scores_B.nan_to_num(0.0, 0.0, 0.0), data.batch.shape("responses")[1]
        tensors = {"rm_scores": LastTokenColumn(scores_B.numpy(), lengths_of(data)[1], width).value()}
        return DataProto.from_dict(tensors=tensors, non_tensors={"rm_error": errors, "rm_truncated": truncated})

    def _truncate(self, row: list[int]) -> list[int]:
        if len(row) <= self.longest:
            return row
        limit = int(self.longest)
        if self.config.truncation == "error":
            raise UserError(
                f"A conversation has {len(row)} tokens for the reward model, which takes {limit} "
                "(reward_model.max_length, or what the model was made for). Raise it, lower data.max_response_length, "
                "or set reward_model.truncation=left or right"
            )
        return row[-limit:] if self.config.truncation == "left" else row[:limit]

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        if self.config.fsdp_config.param_offload:
            self.module.to(self.device)
        try:
            yield
        finally:
            self._offload()

    def _offload(self) -> None:
        if self.config.fsdp_config.param_offload:
            self.module.to("cpu")
