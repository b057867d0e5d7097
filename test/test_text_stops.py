"""Stop strings: cut over any borders, minimal hold-back, state."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as some
import pytest

from flashrt_ros.errors import Corrupt, InvalidArgument
from flashrt_ros.text import StopMatcher


def run(stops, pieces, resume=False):
    matcher = StopMatcher(stops)
    out = ''
    for piece in pieces:
        if resume:
            matcher = StopMatcher.restore(json.loads(json.dumps(matcher.state())))
        emit, stopped, matched = matcher.push(piece)
        out += emit
        if stopped:
            assert matcher.stopped and matcher.push('more') == ('', True, matched)
            assert matcher.flush() == ''
            return out, matched
    return out + matcher.flush(), None


def by_characters(stops, text):
    """Return what must come out, from the definition."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[:end - len(longest)], longest
    return text, None


def test_a_stop_split_over_tokens_is_cut():
    assert run(['\nUser:'], ['Hi', '\n', 'Us', 'er', ': hello']) == ('Hi', '\nUser:')
    assert run(['\nUser:'], ['Hi', '\n', 'Us', 'e', 'd']) == ('Hi\nUsed', None)


def test_holds_back_no_more_than_needed():
    matcher = StopMatcher(['abcd', 'bx'])
    assert matcher.push('zab') == ('z', False, None)
    assert matcher.push('q') == ('abq', False, None)
    assert matcher.push('aab') == ('a', False, None)
    assert matcher.push('x!') == ('a', True, 'bx')


def test_the_first_to_complete_wins_and_the_longest_of_those():
    assert run(['abcd', 'bc'], ['xabcd']) == ('xa', 'bc')
    assert run(['c', 'abc'], ['xabc']) == ('x', 'abc')


def test_no_stops_hold_nothing():
    assert StopMatcher().push('text') == ('text', False, None)


@settings(max_examples=500, deadline=None)
@given(some.lists(some.text('ab', min_size=1, max_size=4), max_size=4),
       some.lists(some.text('abc', max_size=5), max_size=12), some.booleans())
def test_any_split_gives_the_same(stops, pieces, resume):
    assert run(stops, pieces, resume) == by_characters(stops, ''.join(pieces))


@settings(max_examples=300, deadline=None)
@given(some.lists(some.text('ab', min_size=1, max_size=4), min_size=1, max_size=4),
       some.text('abc', max_size=20))
def test_what_is_held_is_the_start_of_a_stop(stops, text):
    matcher = StopMatcher(stops)
    emitted, stopped, _ = matcher.push(text)
    held = text[len(emitted):]
    if not stopped and held:
        assert any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize('stops', [
    'stop', b'x', [''], [7], ['x'] * 17, ['x' * 257], None, {'a': 1}, [None]])
def test_bounds(stops):
    with pytest.raises(InvalidArgument):
        StopMatcher(stops)


def test_limits_themselves_are_allowed():
    assert len(StopMatcher([chr(97 + n) * 256 for n in range(16)]).stops) == 16


@pytest.mark.parametrize('state', [
    None, {}, {'stops': 'x', 'held': '', 'matched': None},
    {'stops': ['abc'], 'held': 'x', 'matched': None},
    {'stops': ['abc'], 'held': 'abc', 'matched': None},
    {'stops': ['abc'], 'held': [], 'matched': None},
    {'stops': ['abc'], 'held': '', 'matched': 'x'}])
def test_malformed_states_are_corrupt(state):
    with pytest.raises(Corrupt):
        StopMatcher.restore(state)
