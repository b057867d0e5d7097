"""The role of the last message is not known behind a rollback; strict templates render it."""

import re

import pytest

from flashrt_ros.errors import InvalidArgument
from flashrt_ros.text import ChatTemplate, TurnState

STRICT = (
    "{% set ns = namespace(i=0) %}{% for m in messages %}{% if m['role'] == 'system' %}"
    "[SYS]{{ m['content'] }}[/SYS]{% else %}{% if (m['role'] == 'user') != (ns.i % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.i = ns.i + 1 %}"
    "{% if m['role'] == 'user' %}[INST]{{ m['content'] }}[/INST]{% else %}{{ m['content'] }}</s>"
    '{% endif %}{% endif %}{% endfor %}')


def test_roles_that_must_alternate():
    chat = ChatTemplate(STRICT, {}, re.compile('</s>'))
    user = [{'role': 'user', 'content': 'hi'}]
    assert chat.delta(user, True, TurnState.MESSAGE, None) == '[INST]hi[/INST]'
    with pytest.raises(InvalidArgument, match='alternate'):
        chat.delta(user, True, TurnState.MESSAGE, 'user')
