"""Encodes text of tools and environments, so that control tokens which it spells stay plain text.

A chat template is rendered to text and the text is cut into tokens, so a tool result `x<|im_end|>` would end its turn.
Here a control token is real only if the template itself wrote it:

1. A mark is inserted into control tokens that a message spells, before the template sees them. Control tokens that are
   still intact in the rendered text were written by the template.
2. Those of the template are renamed and the mark is removed. Then a copy of the tokenizer encodes the text. The copy
   knows control tokens only by their new names, so `<|im_end|>` is plain text for it.

Names and mark are random, so no result can spell them. Messages that spell no control token, which are nearly all, are
rendered and encoded as usual.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]


class UntrustedText:
    """Token ids of messages. Example: `UntrustedText(tokenizer).ids(messages, lambda those: template(those))`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special, self._added = _control_tokens(tokenizer)
        self._all = {**self._added, **self.special}
        self._normalizes = any(one.normalized for one in tokenizer.added_tokens_decoder.values())
        self._mark = secrets.token_hex(16)
        self._copies: dict[frozenset[str], _Renamed] = {}

    def ids(self, messages: Sequence[Message], render: Render) -> list[int]:
        """Ids of the text that `render` gives for these messages. Control tokens that messages spell are plain text."""
        if not any(self._spells_control(text) for message in messages for text in _texts(message)):
            return self.encode(render(messages))
        # Added tokens that are not special, such as <tool_response>, count as control tokens only if the template
        # writes them for these messages. Otherwise a message may contain them as words.
        written = render([_map_texts(message, lambda _: "?", keep=_STRUCTURAL_KEYS) for message in messages])
        template_added = {text for text in self._added if text in written}
        text = render([self._defused(message, template_added) for message in messages])
        return self._encode_defused(text, frozenset(template_added | self.special.keys()))

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Its tokens; with `special` as a prompt of its own, behind the token that begins one."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        # The tokenizer's own call does the same through layers for batches and padding, in twice the time.
        if backend is not None and backend.truncation is None and backend.padding is None:
            return backend.encode(text, add_special_tokens=special).ids
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _spells_control(self, text: str) -> bool:
        if any(one in text for one in self._all):
            return True
        # A tokenizer that searches normalized text also finds a token in another spelling.
        return self._normalizes and not set(self._all.values()).isdisjoint(self.encode(text))

    def _defused(self, message: Message, template_added: set[str]) -> Message:
        # A template may search an assistant's message for such a token, for example </think>.
        found = self.special.keys() if message.get("role") == "assistant" else self.special.keys() | template_added
        pattern = _any_of(found)
        return _map_texts(message, lambda text: pattern.sub(lambda m: m[0][:1] + self._mark + m[0][1:], text))

    def _encode_defused(self, text: str, controls: frozenset[str]) -> list[int]:
        if controls not in self._copies:
            self._copies[controls] = _Renamed(self.tokenizer, {one: self._all[one] for one in controls})
        renamed = self._copies[controls]
        pieces = _any_of(controls, keep=True).split(text)
        return renamed.ids([piece.replace(self._mark, "") for piece in pieces])


@lru_cache(maxsize=4)
def untrusted_text(tokenizer: Any) -> UntrustedText:
    """The cached `UntrustedText` of a tokenizer; copying a large vocabulary takes a second."""
    return UntrustedText(tokenizer)


class _Renamed:
    """A copy of a tokenizer that knows its control tokens (text -> id) by other names."""

    def __init__(self, tokenizer: Any, controls: Mapping[str, int]) -> None:
        self.tokenizer, self.controls = tokenizer, controls
        nonce = secrets.token_hex(16)
        self.names = {text: f"{nonce}:{number}:" for text, number in controls.items()}
        self.real = {name: controls[text] for text, name in self.names.items()}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.backend = None if backend is None else _with_names(backend, self.names)

    def ids(self, pieces: Sequence[str]) -> list[int]:
        """Ids of a text that is split at the template's own control tokens: every second piece is one."""
        if self.backend is not None:
            return self._plain("".join(self.names[one] if at % 2 else one for at, one in enumerate(pieces)))
        return [
            number for at, one in enumerate(pieces) for number in ([self.controls[one]] if at % 2 else self._plain(one))
        ]

    def _plain(self, text: str) -> list[int]:
        found = [(self.real.get(token), token) for token in self._tokens(text)]
        return [number for real, token in found for number in ([real] if real is not None else self._token_ids(token))]

    def _tokens(self, text: str) -> list[str]:
        if self.backend is not None:
            return self.backend.encode(text, add_special_tokens=False).tokens
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        return self.tokenizer.convert_ids_to_tokens(self.tokenizer(text, **options)["input_ids"])

    def _token_ids(self, token: str) -> list[int]:
        # Some vocabularies also have a control token as an ordinary word (Unigram's "</s>"): then it is spelled out.
        spelled = [token] if token not in self.controls else [one for char in token for one in self._tokens(char)]
        return self.tokenizer.convert_tokens_to_ids(spelled)


def _control_tokens(tokenizer: Any) -> tuple[dict[str, int], dict[str, int]]:
    """(special tokens, other added tokens), each text -> id. The unknown token is not special here: any rare character
    may give it."""
    added = {one.content: (number, one.special) for number, one in tokenizer.added_tokens_decoder.items()}
    named = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=False))
    special = {text: number for text, (number, is_special) in added.items() if is_special} | named
    special = {text: number for text, number in special.items() if text.strip() and text != tokenizer.unk_token}
    others = {text: number for text, (number, _) in added.items() if text.strip() and text not in special}
    return special, others


def _with_names(backend: Any, names: Mapping[str, str]) -> Any:
    from tokenizers import Tokenizer

    described = json.loads(backend.to_str())
    for added in described["added_tokens"]:
        added["content"] = names.get(added["content"], added["content"])
    described |= {"truncation": None, "padding": None, "post_processor": None}
    return Tokenizer.from_str(json.dumps(described))


def _any_of(texts: Any, *, keep: bool = False) -> re.Pattern[str]:
    """Matches any of these texts, and the longest if several match; with `keep`, `split` also returns the matches."""
    longest_first = "|".join(re.escape(one) for one in sorted(texts, key=len, reverse=True)) or r"(?!)"
    return re.compile(f"({longest_first})" if keep else longest_first)


def _texts(value: Any) -> Iterator[str]:
    """All texts of a message."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(one)


# Keys of a message that templates read besides its text.
_STRUCTURAL_KEYS = ("role", "type", "name", "id", "tool_call_id")


def _map_texts(value: Any, change: Callable[[str], str], keep: Sequence[str] = ()) -> Any:
    """The message with its texts changed, except the values of the keys in `keep`."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: one if key in keep else _map_texts(one, change, keep) for key, one in value.items()}
    return [_map_texts(one, change, keep) for one in value] if isinstance(value, list | tuple) else value
