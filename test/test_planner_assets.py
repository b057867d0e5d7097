"""
The embedded planner: its corpus does not leak, its directory is what Hugging Face tools expect.
"""

import json
from pathlib import Path
import random
import sys

import pytest

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / 'flashrt_ros' / 'assets' / 'planner'
TOOLS = ROOT / 'tools' / 'planner'

tokenizers = pytest.importorskip('tokenizers')


@pytest.fixture(scope='module', autouse=True)
def tools_on_path():
    """Make tools/planner importable here and nowhere else."""
    names = {p.stem for p in TOOLS.glob('*.py')}
    sys.path.insert(0, str(TOOLS))
    yield
    sys.path.remove(str(TOOLS))
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture(scope='module')
def tokenizer():
    return tokenizers.Tokenizer.from_file(str(ASSETS / 'tokenizer.json'))


def test_generator_is_deterministic():
    from corpus import sample

    first = [sample(random.Random(5)).messages() for _ in range(3)]
    assert first == [sample(random.Random(5)).messages() for _ in range(3)]


def test_no_held_out_composition_in_training():
    from corpus import sample
    from tasks import held_out

    rng = random.Random(11)
    trained = {k for _ in range(400) for t in sample(rng, 'train').turns for k in t.keys}
    tested = [t for _ in range(100) for t in sample(rng, 'heldout').turns]
    assert not any(held_out(k) for k in trained)
    assert all(t.novel for t in tested)
    assert not {k for t in tested for k in t.keys if held_out(k)} & trained


def test_answers_are_json_lines_of_known_skills():
    from corpus import sample

    rng = random.Random(2)
    skills = {
        'navigate',
        'pick',
        'place',
        'handover',
        'open',
        'close',
        'pour',
        'push',
        'look_at',
        'say',
        'wait',
        'dock',
        'wipe',
        'switch',
        'follow',
    }
    for _ in range(200):
        for turn in sample(rng).turns:
            assert {json.loads(line)['skill'] for line in turn.answer.split('\n')} <= skills


def test_plan_follows_the_state_that_answers_leave():
    from tasks import plan, Ref, Step
    from world import Thing, World

    mug = Thing('mug_2', 'mug', 'red', 'ceramic', 'fridge', content='')
    world = World(
        'kitchen', ['fridge', 'shelf'], {'fridge': True}, {'Zoë': 'shelf'}, 'Zoë', [mug], 'dock', 80
    )
    calls, kind = plan([Step('pick', obj=Ref('mug', 'the mug'))], world)
    assert kind == 'ok'
    assert [c['skill'] for c in calls] == ['navigate', 'open', 'pick']
    calls, _ = plan([Step('bring_me', obj=Ref('mug', 'it', pronoun=True))], world)
    assert calls == [
        {'skill': 'navigate', 'to': 'Zoë'},
        {'skill': 'handover', 'object': 'mug_2', 'to': 'Zoë'},
    ]
    calls, kind = plan([Step('pick', obj=Ref('mug', 'the mug'))], world)
    assert (kind, calls[0]['text']) == ('has_it', 'Zoë has mug_2.')


@pytest.mark.parametrize('text', ['Zoë', 'Łukasz', 'café', '美咲', '🙂 – „ß“', 'a\n\n b\t c', ''])
def test_tokenizer_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_pieces_encode_like_the_whole(tokenizer):
    from corpus import sample
    from tokenizer import encode, TURN_END, TURN_START

    rng = random.Random(8)
    for _ in range(20):
        messages = sample(rng).messages()
        text = ''.join(f'{TURN_START}{m["role"]}\n{m["content"]}{TURN_END}\n' for m in messages)
        assert encode(tokenizer, messages)[0] == tokenizer.encode(text).ids


def test_template_only_appends():
    transformers = pytest.importorskip('transformers')
    chat = transformers.AutoTokenizer.from_pretrained(ASSETS)
    messages = [
        {'role': 'system', 'content': 'scene: lab'},
        {'role': 'user', 'content': 'come here'},
        {'role': 'assistant', 'content': '{"skill": "dock"}'},
        {'role': 'user', 'content': 'go'},
    ]
    for count in range(1, len(messages)):
        shorter = chat.apply_chat_template(messages[:count], tokenize=False)
        assert chat.apply_chat_template(messages[: count + 1], tokenize=False).startswith(shorter)
    prompt = chat.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert chat.apply_chat_template(messages[:3], tokenize=False).startswith(prompt)


def test_directory_is_small_and_whole():
    config = json.loads((ASSETS / 'config.json').read_text())
    assert config['model_type'] == 'qwen3_5_text'
    assert config['architectures'] == ['Qwen3_5ForCausalLM']
    assert json.loads((ASSETS / 'generation_config.json').read_text())['eos_token_id'] == [2, 0]
    assert sum(f.stat().st_size for f in ASSETS.rglob('*') if f.is_file()) <= 12_000_000


def test_packed_forward_equals_transformers(tokenizer):
    torch = pytest.importorskip('torch')
    pytest.importorskip('transformers')
    from batches import pack
    from corpus import conversation
    from modeling import new_model, packed_logits, planner_config

    rng = random.Random(3)
    model = new_model(planner_config(1536, hidden_size=64, num_hidden_layers=4), 1).eval()
    batch = pack(
        [conversation(rng, 'train', 'small', 1) for _ in range(3)], tokenizer, 4096, fill=False
    )
    ids, cu, pos = (torch.from_numpy(batch[n]) for n in ('ids', 'cu', 'pos'))
    with torch.no_grad():
        packed = packed_logits(model, ids, cu, pos, batch['longest'])
        for a, b in zip(cu[:-1].tolist(), cu[1:].tolist()):
            alone = model(ids[None, a:b]).logits[0]
            torch.testing.assert_close(packed[a:b], alone, atol=1e-4, rtol=1e-4)
