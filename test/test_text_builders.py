"""Small tokenizers and templates for the text tests, and what must hold of them."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    'the red cup is on the kitchen table, bring it to Ada',
    'go to the charging dock and wait there until the door opens',
    'system user assistant message hello world, how are you today?',
    'Grüße aus Köln, naïve café, 東京の部屋, emoji 🤖🔋 and more words',
    'imend im_end im_start <| |> end start \n\n\n one two three 1234567890',
] * 4
SPECIALS = ['<|endoftext|>', '<|im_start|>', '<|im_end|>', '<|begin_of_text|>',
            '<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>', '<|startoftext|>']

CHATML_DEFAULT = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a robot.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")

# After the habits of the Qwen3.5 template: trims, insists on a user's turn and on the system
# message being first, thinks, drops old thoughts, opens a thought in the generation prompt.
QWEN_LIKE = """
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- if ns.last < 0 %}{{- raise_exception('No user query found in messages.') }}{% endif %}
{%- for message in messages %}
    {%- set content = message.content | trim %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}
            {{- raise_exception('System message must be at the beginning.') }}
        {%- endif %}
        {{- '<|im_start|>system\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- raise_exception('Unexpected message role.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}"""

LLAMA3_LIKE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}")

# After the habits of the LFM2 template: bos first, the system message taken out of the list.
LFM2_LIKE = """{{- bos_token -}}
{%- set system = '' -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set system = messages[0]['content'] -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- if system -%}{{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' -}}{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['content'] is not string -%}
        {{- message['content'] | tojson -}}
    {%- else -%}{{- message['content'] -}}{%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

LLAMA2_LIKE = """{% if messages[0]['role'] == 'system' -%}
    {% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' -%}
    {% set rest = messages[1:] -%}
{% else %}{% set system = '' %}{% set rest = messages %}{% endif -%}
{% for message in rest -%}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant') -}}
    {% endif -%}
    {% if message['role'] == 'user' -%}
        {{ bos_token + '[INST] ' + (system if loop.first else '') + message['content']
           + ' [/INST]' -}}
    {% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif -%}
{% endfor %}"""


def byte_level(vocab: int = 700) -> tokenizers.Tokenizer:
    """Train a byte-level BPE with Qwen's split; <think> is added but not special."""
    made = tokenizers.Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(
            r'[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'),
            'isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=vocab, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    made.add_special_tokens(SPECIALS)
    made.add_tokens([AddedToken(text, special=False, normalized=False)
                     for text in ('<think>', '</think>', '<tool_call>')])
    return made


def byte_fallback() -> tokenizers.Tokenizer:
    """Train a BPE as Llama 2's: word-start marks, unknown characters as bytes."""
    base = tokenizers.Tokenizer(models.BPE(unk_token='<unk>', fuse_unk=True))
    mark = normalizers.Sequence([normalizers.Prepend('\u2581'), normalizers.Replace(' ', '\u2581')])
    base.normalizer = mark
    base.train_from_iterator(
        [line.encode('ascii', 'ignore').decode() for line in CORPUS], trainers.BpeTrainer(
            vocab_size=400, show_progress=False, special_tokens=[
                '<unk>', '<s>', '</s>', *(f'<0x{byte:02X}>' for byte in range(256))]))
    state = json.loads(base.to_str())
    state['model']['byte_fallback'] = True
    state['added_tokens'] = [item for item in state['added_tokens'] if item['id'] < 3]
    made = tokenizers.Tokenizer.from_str(json.dumps(state))
    made.decoder = decoders.Sequence([
        decoders.Replace('\u2581', ' '), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(' ', 1, 0)])
    return made


def metaspace() -> tokenizers.Tokenizer:
    """Train a Unigram model behind Metaspace, as T5 and XLNet have it."""
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme='first')
    made.decoder = decoders.Metaspace(prepend_scheme='first')
    made.train_from_iterator(CORPUS, trainers.UnigramTrainer(
        vocab_size=300, show_progress=False, unk_token='<unk>',
        special_tokens=['<unk>', '<s>', '</s>']))
    return made


def save(directory: Path, made: tokenizers.Tokenizer, template: str | None = None,
         in_config: bool = False, **named: str) -> Path:
    """Write an HF directory that both transformers and this package load."""
    made.save(str(directory / 'tokenizer.json'))
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', **named}
    if in_config:
        config['chat_template'] = template
    elif template is not None:
        (directory / 'chat_template.jinja').write_text(template)
    (directory / 'tokenizer_config.json').write_text(json.dumps(config))
    return directory
