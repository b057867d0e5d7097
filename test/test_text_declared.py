"""Special tokens that tokenizer_config.json alone declares get the ids that transformers gives."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from flashrt_ros.errors import Corrupt
from flashrt_ros.text import Text

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def load(path, **config):
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(BYTES)},
                                                merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(['<|old|>'])
    tokenizer.save(str(path / 'tokenizer.json'))
    (path / 'tokenizer_config.json').write_text(json.dumps(
        {'eos_token': '<|end|>', 'tokenizer_class': 'PreTrainedTokenizerFast', **config}))
    return Text.load(path)


@pytest.mark.parametrize('config', [
    {'extra_special_tokens': ['<|old|>', '<|new|>', '<|newer|>']},
    {'extra_special_tokens': {'a': '<|new|>', 'b': {'content': '<|newer|>'}}},
    {'additional_special_tokens': ['<|new|>', '<|newer|>']}], ids=str)
def test_ids(tmp_path, config):
    text = load(tmp_path, **config)
    names = ['<|old|>', '<|end|>', '<|new|>', '<|newer|>']
    assert [text.token_id(name) for name in names] == [256, 257, 258, 259]
    assert text.encode('a<|new|>b', allow_special=True)[1] == 258
    assert 258 not in text.encode('a<|new|>b')
    assert text.decode([258, *text.encode('x')]) == 'x'
    if isinstance(config.get('extra_special_tokens'), list):
        other = pytest.importorskip('transformers').AutoTokenizer.from_pretrained(tmp_path)
        assert other.convert_tokens_to_ids(names) == [256, 257, 258, 259]


def test_what_the_tokenizer_has_makes_no_other_digest(tmp_path):
    plain = load(tmp_path).digest()
    assert load(tmp_path, extra_special_tokens=['<|old|>']).digest() == plain
    assert load(tmp_path, extra_special_tokens=['<|new|>']).digest() != plain


@pytest.mark.parametrize('listed', ['<|new|>', [5], {'a': None}], ids=str)
def test_malformed(tmp_path, listed):
    with pytest.raises(Corrupt, match='extra_special_tokens'):
        load(tmp_path, extra_special_tokens=listed)
