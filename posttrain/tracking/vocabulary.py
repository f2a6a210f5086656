"""vocabulary.parquet: the bytes that each token id stands for, so that samples can be read token by token without the
model's tokenizer, which may lie on another machine or be gone.

Row i is token i; a token is bytes, not text, as a character may be spread over several of them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.texts import utf8
from posttrain.tracking.atomic import replace_file
from posttrain.tracking.stored import is_plain

NAME = "vocabulary.parquet"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def write_vocabulary(folder: Path, tokenizer: Any) -> Path:
    """Write the tokens of `tokenizer` into a run's folder."""
    path = folder / NAME
    table = pa.table({"token": pa.array(token_bytes(tokenizer), pa.binary())})
    replace_file(path, lambda temporary: pq.write_table(table, temporary, compression="zstd", use_dictionary=False))
    return path


def read_vocabulary(folder: Path) -> list[bytes]:
    """What was written; nothing where there is no such file, or none that can be read."""
    if not is_plain(folder / NAME):
        return []
    try:
        tokens = pq.read_table(folder / NAME)["token"].cast(pa.binary()).to_pylist()
    except (OSError, pa.ArrowException, KeyError):
        return []
    return [token or b"" for token in tokens]


def token_bytes(tokenizer: Any) -> list[bytes]:
    """By token id; ids that stand for nothing are empty."""
    pieces = tokenizer.get_vocab()
    added = {number: str(token) for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    tokens = [b""] * (max([*pieces.values(), *added], default=-1) + 1)
    of_piece = _from_bytes() if _is_byte_level(tokenizer) else _from_words
    for piece, number in pieces.items():
        tokens[number] = of_piece(piece)
    for number, text in added.items():
        tokens[number] = utf8(text)
    return tokens


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether every character of a piece stands for one byte, as in GPT-2, Qwen and Llama 3."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return hasattr(tokenizer, "byte_decoder")
    return '"ByteLevel"' in json.dumps(json.loads(backend.to_str()).get("decoder"))


def _from_bytes():
    """Printable bytes stand for themselves, the others for the characters from U+0100 on, in their order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}

    def of_piece(piece: str) -> bytes:
        return bytes(table[char] for char in piece) if all(char in table for char in piece) else utf8(piece)

    return of_piece


def _from_words(piece: str) -> bytes:
    """Pieces of SentencePiece (`▁` for a blank, `<0x0A>` for a byte), or plain words."""
    match = _BYTE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else utf8(piece.replace("▁", " "))
