"""Token ids as texts that join to the response: a character that is spread over tokens stands with the last of them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


def token_texts(ids: Sequence[int], vocabulary: Sequence[bytes]) -> list[str]:
    """One text per token. Bytes that are no UTF-8 become U+FFFD, ids without bytes their number."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = []
    for number in ids:
        if 0 <= number < len(vocabulary):
            texts.append(decoder.decode(vocabulary[number]))
        else:
            texts.append(decoder.decode(b"", True) + f"⟨{number}⟩")
            decoder.reset()
    if texts:
        texts[-1] += decoder.decode(b"", True)
    return texts
