"""vocabulary.parquet gives each token's bytes, whatever kind of tokenizer made them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from posttrain.models.embedded import byte_tokenizer
from posttrain.tracking.samples import read_vocabulary, token_bytes, write_vocabulary


def test_a_byte_level_tokenizers_tokens_join_to_the_text(tmp_path):
    tokenizer = byte_tokenizer()
    write_vocabulary(tmp_path, tokenizer)
    tokens = read_vocabulary(tmp_path)
    text = "a b\n你好 שלום \x00é"
    assert b"".join(tokens[number] for number in tokenizer.encode(text)).decode() == text
    assert tokens[tokenizer.eos_token_id] == b"<|end|>" and len(tokens) == len(tokenizer)


@pytest.mark.parametrize(
    ("piece", "token"), [("▁the", b" the"), ("<0x0A>", b"\n"), ("你", "你".encode()), ("Ġ", "Ġ".encode())]
)
def test_pieces_of_sentencepiece(piece, token):
    assert token_bytes(SimpleNamespace(get_vocab=lambda: {piece: 1}))[1] == token


def test_a_run_without_the_file_has_no_tokens(tmp_path):
    assert read_vocabulary(tmp_path) == []
    (tmp_path / "vocabulary.parquet").write_bytes(b"cut off")
    assert read_vocabulary(tmp_path) == []
