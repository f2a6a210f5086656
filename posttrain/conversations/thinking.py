"""Drops the thinking of earlier turns from a context, as the chat template does (`thinking_in_history=strip`).

Deployed models usually do not see what they thought in earlier turns: Qwen3's template drops it once a user's message
follows, DeepSeek-R1's behind every turn. Here only the thinking is taken out of the tokens; the words and calls of a
turn stay the tokens that were sampled. What stands in its place is what the template writes there: nothing, blanks, or
empty marks. That the tokens are those of the rendered conversation is proved at the start of a run.

A context without its thinking is another prefix than the one that the earlier tokens were sampled behind, so it is a
further row of the sample (`chat.py`, `ledger.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.conversations.formats.base import THINKING, open_thinking, without_thinking
from posttrain.conversations.settings import TURNS_KEY
from posttrain.conversations.templates import MessageTemplate, NoTemplate
from posttrain.errors import UserError

KEY = f"{TURNS_KEY}.thinking_in_history"
Span = tuple[int, int]
"""Where a turn of the model begins and ends in its context."""
_OPENING = 32  # tokens at the end of a prompt that show whether it opens the model's thinking
_THOUGHT, _WORDS, _LINES = "7d41c0b2f3", "5be8f20a96", "\n\n"
_QUESTION, _FOLLOWING = {"role": "user", "content": "?"}, {"role": "user", "content": "9c3e71?"}


@dataclass(frozen=True)
class EarlierThinking:
    """Example: `EarlierThinking.of(template).drop(ids, [(20, 80)])` gives the context without the turn's thinking."""

    template: MessageTemplate
    mark: str
    """Begins the model's thinking."""
    as_field: bool
    """Whether the template takes the thinking of a message as `reasoning_content`, and not in its text."""
    opened: list[int]
    """What the template writes at the end of a prompt and not before an earlier turn, such as `<think>`."""
    shown: list[int]
    """What it writes instead of an earlier turn's thinking, such as `<think></think>`."""
    keeps_lines: bool
    """Whether empty lines behind the thinking stay, as with DeepSeek-R1."""
    _roles: dict[str, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, template: MessageTemplate) -> EarlierThinking:
        """How this template drops thinking. UserError if it keeps it, or writes earlier turns differently."""
        for as_field in (False, True):
            for mark in THINKING:
                if (found := cls._try(template, mark, as_field)) is not None:
                    found._prove()
                    return found
        raise UserError(
            f"{KEY}=strip: the chat template does not drop the thinking of earlier turns (what stands between marks "
            "such as <think> and </think>), so there is nothing to strip.\n"
            f"  to do:  leave {KEY} out: all thinking stays in the history; or give the tokenizer a template that "
            "drops it (actor_rollout_ref.model.tokenizer_path)"
        )

    @classmethod
    def _try(cls, template: MessageTemplate, mark: str, as_field: bool) -> EarlierThinking | None:
        turn = _turn(mark, as_field=as_field, lines="")
        try:
            opening = template.render([_QUESTION], opens=True)
            text = template.render([_QUESTION, turn, _FOLLOWING], opens=True)
            last = template.render([_QUESTION, turn], opens=False) if as_field else ""
        except NoTemplate:
            return None
        if _THOUGHT in text or _WORDS not in text:
            return None
        # A template that knows nothing of the field drops it, too; one that does writes it behind the mark.
        if as_field and not (_THOUGHT in last and last.partition(_THOUGHT)[0].rstrip().endswith(mark)):
            return None
        opened, shown = template.untrusted.encode(opening), template.untrusted.encode(text[: text.index(_WORDS)])
        lines = template.render([_QUESTION, _turn(mark, as_field=as_field, lines=_LINES), _FOLLOWING], opens=True)
        common = 0
        while opened[common : common + 1] == shown[common : common + 1] != []:
            common += 1
        return cls(template, mark, as_field, opened[common:], shown[common:], lines != text)

    def _prove(self) -> None:
        """The tokens of a context without its thinking must be those of the conversation that the template renders."""
        opening, turn = self.template.render([_QUESTION], opens=True), _turn(self.mark, as_field=self.as_field)
        text = f"\n{_THOUGHT}\n{THINKING[self.mark]}{_LINES}{_WORDS}"
        if not open_thinking(opening):
            text = f"{self.mark}{text}"
            if without_thinking(opening) != opening:  # it skips thinking, as with enable_thinking=false
                text, turn = _WORDS, {"role": "assistant", "content": _WORDS}
        encode = self.template.untrusted.encode
        prompt, sampled = encode(opening), encode(text)
        read = self.template.ids([_FOLLOWING], sampled[-1])
        made = [*self.drop([*prompt, *sampled], [(len(prompt), len(prompt) + len(sampled))]), *read]
        wanted = encode(self.template.render([_QUESTION, turn, _FOLLOWING], opens=True))
        if made != wanted:
            show = self.template.tokenizer.decode
            raise UserError(
                f"{KEY}=strip: an earlier turn without its thinking cannot be written as the chat template writes it.\n"
                f"  template:  {show(wanted)!r}\n  by tokens: {show(made)!r}\n"
                f"  to do:  leave {KEY} out: all thinking stays in the history"
            )

    def check(self, *, only_tools: bool) -> None:
        """UserError in a run whose conversations never have a message before which the template drops thinking."""
        if only_tools and not self.drops_before("tool"):
            raise UserError(
                f"{KEY}=strip has no effect: the chat template keeps the thinking of earlier turns while tools answer, "
                "and drops it once a user's message follows, which conversations with tools alone do not have.\n"
                f"  to do:  leave {KEY} out, or let an agent or environment lead the conversations"
            )

    def drops_before(self, role: str) -> bool:
        """Whether the template drops earlier thinking once a message of this role follows. Many keep it while tools
        answer."""
        if role not in self._roles:
            self._roles[role] = self._drops_before(role)
        return self._roles[role]

    def _drops_before(self, role: str) -> bool:
        message: dict[str, Any] = {"role": role, "content": _FOLLOWING["content"]}
        turn, calls, more = _turn(self.mark, as_field=self.as_field), self.template.calls, {}
        if role == "tool" and calls is not None:
            id = calls.format.call_id("probe", 0)
            made = calls.message([("probe", {"text": "?"})], [id])
            turn = {**made, **({**turn, "content": made["content"]} if self.as_field else turn)}
            message |= {"name": "probe", "tool_call_id": id}
            more = {"tools": calls.tools}
        try:
            return _THOUGHT not in self.template.render([_QUESTION, turn, message], opens=True, **more)
        except NoTemplate:  # such a message is rejected when it is told
            return False

    def drop(self, ids: Sequence[int], turns: Sequence[Span]) -> list[int]:
        """A context without the thinking of these turns; the same tokens if they have none."""
        made, place = list[int](), 0
        for start, end in turns:
            made += ids[place:start]
            opened = self.opened if made[len(made) - len(self.opened) :] == self.opened else []
            words = self._words(ids[max(0, start - _OPENING) : start], list(ids[start:end]))
            if words is None and opened:  # the template opens or skips thinking in prompts alone
                words = list(ids[start:end])
            elif words is not None:
                words = [*self.shown, *words]
            if words is None:
                made += ids[start:end]
            else:
                made[len(made) - len(opened) :] = words
            place = end
        return [*made, *ids[place:]]

    def _words(self, before: Sequence[int], turn: list[int]) -> list[int] | None:
        """What follows the thinking of a turn; None if it has none. Of thinking that did not end, only the token that
        ends the turn is left."""
        tokenizer = self.template.tokenizer

        def decode(count: int) -> str:
            return tokenizer.decode(turn[:count], skip_special_tokens=False)

        opening = open_thinking(tokenizer.decode(list(before), skip_special_tokens=False))
        if not (opening + decode(len(turn))).lstrip().startswith(self.mark):
            return None
        closing = THINKING[self.mark]
        if closing not in decode(len(turn)):
            return turn[-1:] if turn[-1:] and turn[-1] in tokenizer.all_special_ids else []
        low, high = 0, len(turn)  # the fewest tokens with the closing mark
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if closing in decode(middle) else (middle + 1, high)
        # A token may hold the end of the mark, or of the lines behind it, together with words.
        rest = decode(low).partition(closing)[2]
        if not self.keeps_lines:
            rest = rest.lstrip("\n")
            while not rest and low < len(turn) and (text := tokenizer.decode([turn[low]])).startswith("\n"):
                rest, low = text.lstrip("\n"), low + 1
        return [*(self.template.untrusted.encode(rest) if rest else []), *turn[low:]]


def _turn(mark: str, *, as_field: bool, lines: str = _LINES) -> Mapping[str, Any]:
    """A turn with a thought, as a message."""
    if as_field:
        return {"role": "assistant", "reasoning_content": _THOUGHT, "content": _WORDS}
    return {"role": "assistant", "content": f"{mark}\n{_THOUGHT}\n{THINKING[mark]}{lines}{_WORDS}"}
