"""
Text: tokenizer, chat rendering, incremental detokenizer, stop strings.

History is token ids and only grows; see ``docs/text.md``. Needs ``tokenizers`` and ``jinja2``.
"""

from flashrt_ros.text.chat import ChatTemplate, TurnState
from flashrt_ros.text.detokenizer import Detokenizer
from flashrt_ros.text.stops import StopMatcher
from flashrt_ros.text.tokenizer import check_messages, next_turn, Text

__all__ = [
    'ChatTemplate', 'check_messages', 'Detokenizer', 'next_turn', 'StopMatcher', 'Text',
    'TurnState']
