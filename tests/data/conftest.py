"""A byte-level tokenizer without merges: one token per UTF-8 byte, plus the chat marks."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'critic' %}{{ raise_exception('no critics here') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>{% endif %}{% endif %}"
)


def make_tokenizer(chat_template=TEMPLATE, adds_bos=False):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>"]})
    tokenizer.chat_template = chat_template
    if adds_bos:
        mark = ("<|system|>", tokenizer.convert_tokens_to_ids("<|system|>"))
        added = processors.TemplateProcessing(single=f"{mark[0]} $A", special_tokens=[mark])
        tokenizer.backend_tokenizer.post_processor = added
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def bos_tokenizers():
    """Two that put a mark before every text: with chat template, and without."""
    return make_tokenizer(adds_bos=True), make_tokenizer(chat_template=None, adds_bos=True)


@pytest.fixture(scope="session")
def bare_tokenizer():
    return make_tokenizer(chat_template=None)
