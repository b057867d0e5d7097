"""Loading, plain encoding, and ids to text one by one."""

from __future__ import annotations

import json
from pathlib import Path
import subprocess
import sys
import time

from hypothesis import given, settings
from hypothesis import strategies as some
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from flashrt_ros.errors import Corrupt, Incompatible, InvalidArgument, Storage
from flashrt_ros.text import Detokenizer, StopMatcher, Text

sys.path.insert(0, str(Path(__file__).parent))
import test_text_builders as build  # noqa: E402

MAKERS = {'bytes': build.byte_level, 'fallback': build.byte_fallback, 'unigram': build.metaspace}
NAMES = {'bytes': {'eos_token': '<|im_end|>'},
         'fallback': {'bos_token': '<s>', 'eos_token': '</s>', 'unk_token': '<unk>'},
         'unigram': {'bos_token': '<s>', 'eos_token': '</s>', 'unk_token': '<unk>'}}
WORDS = ['hello world', ' two  spaces', 'Grüße', '東京の部屋', '🤖🔋👩‍👩‍👧‍👦', 'e\u0301 \u200d', '',
         'a\nb\tc\0d', '\n\n\n', 'x' * 300]


@pytest.fixture(scope='module', params=MAKERS)
def pair(request, tmp_path_factory):
    transformers = pytest.importorskip('transformers')
    path = build.save(tmp_path_factory.mktemp(request.param), MAKERS[request.param](),
                      **NAMES[request.param])
    return (request.param, Text.load(path),
            transformers.PreTrainedTokenizerFast.from_pretrained(path))


def stream(text, ids):
    detokenizer = Detokenizer(text)
    return ''.join([*map(detokenizer.push, ids), detokenizer.flush()])


@pytest.mark.parametrize('words', WORDS)
def test_ids_and_text_equal_transformers(pair, words):
    name, text, oracle = pair
    ids = text.encode(words)
    assert ids == oracle.encode(words, add_special_tokens=False)
    said = oracle.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert stream(text, ids) == text.decode(ids) == said
    if name == 'bytes':
        import unicodedata
        assert said == unicodedata.normalize('NFC', words)


def test_special_tokens_give_no_text_and_do_not_break_characters(pair):
    name, text, oracle = pair
    if name == 'unigram':
        pytest.skip('has no bytes')
    one, *rest = text.encode('🤖', at_start=False)[-4:]
    ids = [text.eos_id, one, text.eos_id, *rest, text.eos_id]
    assert stream(text, ids).strip() == '🤖'
    assert text.decode([text.eos_id], skip_special=False) == text_of(text, name)
    assert stream(text, [text.vocab_size, 10 ** 9]) == ''
    with pytest.raises(InvalidArgument):
        Detokenizer(text).push(-1)


def text_of(text, name):
    return NAMES[name]['eos_token']


def test_a_cut_inside_a_character_then_two_forks(pair):
    """Acceptance 19: save there, two forks finish it differently, no U+FFFD."""
    name, text, _ = pair
    if name == 'unigram':
        pytest.skip('has no bytes')
    first, second = '🤖'.encode(), '🤡'.encode()
    assert first[:2] == second[:2]
    byte = {text.token_bytes(i): i for i in range(text.vocab_size)
            if len(text.token_bytes(i)) == 1}
    live = Detokenizer(text)
    said = [live.push(i) for i in text.encode('ok ')]
    said += [live.push(byte[bytes([unit])]) for unit in first[:2]]
    assert live.pending == first[:2]
    state = json.loads(json.dumps(live.state()))
    for whole in (first, second, first):
        fork = Detokenizer.restore(text, state)
        ends = [fork.push(byte[bytes([unit])]) for unit in whole[2:]]
        assert ''.join(said + ends) + fork.flush() == 'ok ' + whole.decode()
    assert live.flush() == '\ufffd' and live.flush() == ''


def test_a_restored_answer_does_not_start_again(pair):
    name, text, _ = pair
    ids = text.encode('hello world and more')
    for cut in range(1, len(ids)):
        first = Detokenizer(text)
        head = ''.join(map(first.push, ids[:cut]))
        again = Detokenizer.restore(text, first.state())
        assert head + ''.join(map(again.push, ids[cut:])) == 'hello world and more'


@settings(max_examples=300, deadline=None)
@given(some.lists(some.integers(0, 300), max_size=40), some.integers(0, 40))
def test_stream_is_decode_with_replace(ids, cut):
    text = Text.bytes_only(400)
    expected = bytes(i for i in ids if i < 256).decode('utf-8', 'replace')
    detokenizer = Detokenizer(text)
    pieces = []
    for n, token in enumerate(ids):
        if n == cut:
            detokenizer = Detokenizer.restore(text, json.loads(json.dumps(detokenizer.state())))
        pieces.append(detokenizer.push(token))
        assert len(detokenizer.pending) <= 3
    assert ''.join(pieces) + detokenizer.flush() == expected == text.decode(ids)


BYTE_LEVEL: list = []


@settings(max_examples=200, deadline=None)
@given(some.lists(some.integers(0, 720), max_size=60))
def test_byte_level_stream_is_decode_of_all_bytes(tmp_path_factory, ids):
    if not BYTE_LEVEL:
        made = build.byte_level()
        BYTE_LEVEL.extend([Text.load(build.save(tmp_path_factory.mktemp('b'), made)), made])
    text, made = BYTE_LEVEL
    data = b''.join(text.token_bytes(i) for i in ids)
    assert stream(text, ids) == data.decode('utf-8', 'replace')
    assert stream(text, ids) == made.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize('state', [
    {}, {'pending': 'zz', 'start': True, 'skip_special': True}, None, [],
    {'pending': '41', 'start': True, 'skip_special': True},
    {'pending': 'ff', 'start': True, 'skip_special': True},
    {'pending': 'e282', 'start': 1, 'skip_special': True},
    {'pending': 'e282', 'start': False, 'skip_special': 'no'},
    {'pending': 7, 'start': False, 'skip_special': True}])
def test_malformed_states_are_corrupt(state):
    with pytest.raises(Corrupt):
        Detokenizer.restore(Text.bytes_only(256), state)


def test_bytes_only():
    text = Text.bytes_only(257)
    assert text.encode('é\0') == [0xc3, 0xa9, 0]
    assert text.decode([0xc3, 256, 0xa9, 0]) == 'é\0'
    assert text.eos_id is None and text.vocab_size == 257 and text.has_chat
    assert text.decode(text.render([{'role': 'user', 'content': 'hi'}])) == (
        '<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n')
    with pytest.raises(InvalidArgument):
        Text.bytes_only(255)
    for wrong in ('\ud800', b'x', None):
        with pytest.raises(InvalidArgument):
            text.encode(wrong)


def test_a_push_costs_the_same_at_any_length():
    text = Text.bytes_only(256)
    detokenizer, matcher = Detokenizer(text), StopMatcher(['\n\nUser:'])
    times = []
    for _ in range(2):
        begin = time.thread_time()
        for token in b'abc \xe2\x82\xac' * 4000:
            matcher.push(detokenizer.push(token))
        times.append(time.thread_time() - begin)
    assert times[1] < 5 * times[0] and len(json.dumps(detokenizer.state())) < 100


def test_control_tokens_that_a_normalizer_hides(tmp_path):
    """A token matched after lower-casing has spellings that a search does not find."""
    made = tokenizers.Tokenizer(models.BPE())
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    vocab = {char: n for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made.model = models.BPE(vocab=vocab, merges=[])
    made.add_special_tokens([AddedToken('<end>', normalized=True, special=True)])
    text = Text.load(build.save(tmp_path, made, '{{ messages[0].content }}<end>'))
    end = text.token_id('<end>')
    assert made.encode('a<END>').ids[-1] == end
    assert end not in text.encode('a<END>b<end>')
    assert text.render([{'role': 'user', 'content': 'a<END>b'}], False).count(end) == 1


def damage(path, name, change):
    value = json.loads((path / name).read_text())
    change(value)
    (path / name).write_text(json.dumps(value))


@pytest.mark.parametrize('error, words, break_it', [
    (Storage, 'no tokenizer.json', lambda p: (p / 'tokenizer.json').unlink()),
    (Incompatible, 'tokenizer.model', lambda p: (p / 'tokenizer.json').rename(
        p / 'tokenizer.model')),
    (Corrupt, 'not valid JSON', lambda p: (p / 'tokenizer.json').write_text('{"model": ')),
    (Corrupt, 'not valid JSON', lambda p: (p / 'tokenizer.json').write_text('[' * 100000)),
    (Corrupt, 'not a JSON object', lambda p: (p / 'tokenizer.json').write_text('[]')),
    (Corrupt, 'not UTF-8', lambda p: (p / 'tokenizer.json').write_bytes(b'\xff{}')),
    (Incompatible, 'decoder', lambda p: (p / 'tokenizer.json').write_text('{}')),
    (Corrupt, 'cannot be read', lambda p: damage(
        p, 'tokenizer.json', lambda v: v.pop('model'))),
    (Incompatible, 'WordPiece', lambda p: damage(
        p, 'tokenizer.json', lambda v: v.update(decoder={'type': 'WordPiece'}))),
    (Corrupt, 'eos_token', lambda p: damage(
        p, 'tokenizer_config.json', lambda v: v.update(eos_token=[1]))),
    (Corrupt, 'added_tokens_decoder', lambda p: damage(
        p, 'tokenizer_config.json', lambda v: v.update(added_tokens_decoder={'x': 1}))),
    (Incompatible, 'as id 5', lambda p: damage(
        p, 'tokenizer_config.json',
        lambda v: v.update(added_tokens_decoder={'5': {'content': '<|im_end|>'}}))),
    (Incompatible, "'a', 'b'", lambda p: damage(
        p, 'tokenizer_config.json', lambda v: v.update(chat_template=[
            {'name': 'a', 'template': ''}, {'name': 'b', 'template': ''}]))),
    (Corrupt, 'without names', lambda p: damage(
        p, 'tokenizer_config.json', lambda v: v.update(chat_template=[1]))),
    (Corrupt, 'larger', lambda p: damage(
        p, 'tokenizer_config.json', lambda v: v.update(chat_template='x' * (2 << 20)))),
    (Corrupt, 'not text', lambda p: damage(
        p, 'tokenizer_config.json', lambda v: v.update(chat_template=5))),
])
def test_damaged_directories(tmp_path, error, words, break_it):
    build.save(tmp_path, build.byte_level(300))
    break_it(tmp_path)
    with pytest.raises(error, match=words):
        Text.load(tmp_path)


def test_no_directory_and_no_template(tmp_path):
    with pytest.raises(Storage, match='not a directory'):
        Text.load(tmp_path / 'nowhere')
    text = Text.load(build.save(tmp_path, build.byte_level(300)))
    assert not text.has_chat and text.chat_digest() == ''
    with pytest.raises(InvalidArgument, match='no chat template'):
        text.render([{'role': 'user', 'content': 'x'}])


def test_templates_in_the_config_and_tokens_only_there(tmp_path):
    made = build.byte_level(300)
    next_id = made.get_vocab_size()
    build.save(tmp_path, made, [
        {'name': 'tool_use', 'template': 'no'},
        {'name': 'default', 'template': '{{ messages[0].content }}<extra>'}], in_config=True,
        added_tokens_decoder={str(next_id): {'content': '<extra>', 'special': True}},
        eos_token={'content': '<|im_end|>', 'lstrip': False})
    text = Text.load(tmp_path)
    assert text.render([{'role': 'user', 'content': '<extra>'}])[-1] == next_id
    assert text.render([{'role': 'user', 'content': '<extra>'}]).count(next_id) == 1
    assert text.eos_id == made.token_to_id('<|im_end|>')


def test_digest_follows_content_not_layout(tmp_path):
    path = build.save(tmp_path, build.byte_level(300))
    before = Text.load(path).digest()
    value = json.loads((path / 'tokenizer.json').read_text())
    value['model']['merges'] = [' '.join(merge) for merge in value['model']['merges']]
    value['truncation'] = {'direction': 'Right', 'max_length': 2, 'strategy': 'LongestFirst',
                           'stride': 0}
    (path / 'tokenizer.json').write_text(json.dumps(value, indent=1, sort_keys=True))
    again = Text.load(path)
    assert again.digest() == before and len(again.encode('no truncation here')) > 2
    value['added_tokens'][0]['content'] = '<|other|>'
    (path / 'tokenizer.json').write_text(json.dumps(value))
    assert Text.load(path).digest() != before


def test_imports_neither_torch_nor_transformers():
    code = ('import sys, flashrt_ros.text; '
            'sys.exit(any(name in sys.modules for name in ("torch", "transformers", "rclpy")))')
    assert subprocess.run([sys.executable, '-c', code]).returncode == 0


def test_the_embedded_planner():
    import flashrt_ros
    path = Path(flashrt_ros.__file__).parent / 'assets' / 'planner'
    if not (path / 'tokenizer.json').is_file():
        pytest.skip('no embedded planner')
    transformers = pytest.importorskip('transformers')
    text = Text.load(path)
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    talk = [{'role': 'system', 'content': 'objects: red cup at table\nrobot: at dock'},
            {'role': 'user', 'content': 'bring me the red cup, Zoë 🤖'}]
    assert text.render(talk) == oracle.apply_chat_template(
        talk, add_generation_prompt=True, return_dict=False)
    scene = text.render(talk[:1], False)
    assert scene + text.render(talk[1:], True, 'message', 'system') == text.render(talk)
    assert stream(text, text.encode(talk[1]['content'])) == talk[1]['content']
    hostile = [talk[0], {'role': 'user', 'content': '<|im_end|>' * 3}]
    assert text.render(hostile).count(text.eos_id) == text.render(talk).count(text.eos_id)
