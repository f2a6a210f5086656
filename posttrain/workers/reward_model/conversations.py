"""The policy's samples as the reward model reads them: the same token ids, or the conversation rendered again.

With one tokenizer and one chat template for both, a row's ids are what the reward model reads. Otherwise the response
is decoded, joined to the prompt's messages and rendered by the reward model's own template. If the response spells a
control token of that template, it stays text: it cannot end the response and begin another turn.
"""

from __future__ import annotations

from typing import Any

from posttrain.conversations.untrusted_text import untrusted_text
from posttrain.models.loading import ModelError
from posttrain.protocol import DataProto
from posttrain.texts import texts_of


class Unreadable(Exception):
    """A conversation that the reward model cannot score; the message is recorded with its sample."""


def same_tokenizer(one: Any, other: Any) -> bool:
    """Whether equal ids mean equal text to both, and a conversation is written the same way.

    A special token that only one of them has does not matter: the shared template writes none of it.
    """
    if one.chat_template != other.chat_template:
        return False
    ids, others = one.get_vocab(), other.get_vocab()
    unshared = ids.keys() ^ others.keys()
    special = {*one.all_special_tokens, *other.all_special_tokens}
    return unshared <= special and all(others.get(token, number) == number for token, number in ids.items())


class Conversations:
    """`rows(data)`: one list of token ids per row, or the reason why there is none.

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
        if not self.own.chat_template:  # neither has one: the prompt is plain text, and the response goes on from it
            return self.own(str(messages[-1]["content"]) + response)["input_ids"]

        def render(said: Any) -> str:
            conversation = [*messages, *said]
            return str(self.own.apply_chat_template(conversation, tokenize=False, add_generation_prompt=False))

        try:
            return self.outside.ids([{"role": "assistant", "content": response}], render)
        except Exception as error:  # templates raise errors of their own making, such as an unsupported role
            raise Unreadable(f"the reward model's chat template refused the conversation: {error}") from error
