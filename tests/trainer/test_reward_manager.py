"""RewardManager: responses are fed many at a time, and each row gets the score of its own."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from posttrain.protocol import DataProto
from posttrain.rewards.types import RewardResult
from posttrain.trainer.ppo.reward import RewardManager, keys_of


class Recorder:
    """A pool that keeps what it is given; the score of a response is its length."""

    def __init__(self):
        self.calls, self.given = [], 0

    def submit_many(self, items):
        self.calls.append(items)

    def wait_some(self):
        given, self.given = self.calls[self.given :], len(self.calls)
        return [(key, RewardResult(float(len(item.solution_str)))) for call in given for key, item in call]


def word_pieces():
    """A tokenizer whose decoding depends on neighbours and is cleaned up afterwards."""
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[END]", "it", "##s", "is", "n't", ",", "42", "##0"])}
    core = Tokenizer(models.WordPiece(vocabulary, unk_token="[PAD]"))
    core.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", eos_token="[END]", clean_up_tokenization_spaces=True
    )


def rows(count, group):
    def column(values):
        array = np.empty(count, dtype=object)
        array[:] = values
        return array

    return DataProto.from_dict(
        non_tensors={
            "uid": column([f"u{i // group}" for i in range(count)]),
            "data_source": column(["mine", None] * (count // 2)),
            "ground_truth": column([[i // group] for i in range(count)]),
            "extra_info": column([{"row": i} for i in range(count)]),
        }
    )


@pytest.mark.parametrize("kind", ["bytes", "word pieces"])
def test_what_is_fed_together_is_decoded_as_one_by_one(kind, tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model) if kind == "bytes" else word_pieces()
    random = np.random.default_rng(0)
    responses = [random.integers(0, len(tokenizer), random.integers(0, 6)).tolist() for _ in range(60)]
    responses[:4] = [[], [tokenizer.eos_token_id], responses[9], tuple(responses[9])]
    pool = Recorder()
    manager = RewardManager(pool, tokenizer, default_source="default")
    batch = rows(60, 4)
    manager.expect(batch)
    fed = list(zip(keys_of(batch), responses, strict=True))
    manager.feed(fed[30:])
    manager.feed([])
    manager.feed(fed[:30])
    scores = dict(manager.wait())
    assert [len(call) for call in pool.calls] == [30, 30]
    for row, (key, item) in enumerate([*pool.calls[1], *pool.calls[0]]):
        assert key == (f"u{row // 4}", row % 4)
        assert item.solution_str == tokenizer.decode(list(responses[row]), skip_special_tokens=True)
        assert (item.tokens, item.group, item.group_size) == (len(responses[row]), f"u{row // 4}", 4)
        assert item.data_source == ("mine" if row % 2 == 0 else "default")
        assert (item.ground_truth, item.extra_info) == ([row // 4], {"row": row})
        assert scores[key].score == len(item.solution_str)


def test_a_whole_batch_is_scored_without_its_padding(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    batch = rows(2, 2)
    a, pad = tokenizer.encode("a", add_special_tokens=False)[0], tokenizer.pad_token_id
    batch.batch["responses"] = torch.tensor([[a, a, a], [a, pad, pad]])
    batch.batch["attention_mask"] = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    assert RewardManager(Recorder(), tokenizer)(batch).tolist() == [[0.0, 0.0, 3.0], [1.0, 0.0, 0.0]]


def test_of_a_whole_batch_the_words_of_others_are_told_apart_by_response_mask(tiny_model):
    tokenizer, pool, batch = AutoTokenizer.from_pretrained(tiny_model), Recorder(), rows(2, 1)
    ids = tokenizer(["1+1told2", "no turns"])["input_ids"]
    batch.batch["responses"] = torch.tensor(ids)
    batch.batch["attention_mask"] = torch.ones(2, 8, dtype=torch.long)
    batch.batch["response_mask"] = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 1], [1] * 8])
    RewardManager(pool, tokenizer).score(batch)
    ((_, several), (_, one)) = pool.calls[0]
    assert (several.solution_str, several.own_words, several.tokens) == ("1+1told2", "1+1\n2", 4)
    assert (one.solution_str, one.own_words, one.tokens) == ("no turns", None, 8)
