"""The host part of a boundary: fold schedules and their replay."""

from hypothesis import given
from hypothesis import strategies as st

from flashrt_ros.capsule.boundary import HostState, Schedule

SAMPLER = (0.5, 10, 0.5, 7, 0)


@st.composite
def schedules(draw):
    schedule, folds, counter = Schedule(), [], 0
    for _ in range(draw(st.integers(0, 8))):
        if draw(st.booleans()):
            length = draw(st.sampled_from([1, 2, 5, 512]))
            schedule = schedule.appended(length)
            folds.append((length, None))
        else:
            for _ in range(draw(st.integers(1, 5))):
                sampler = (*SAMPLER[:4], counter)
                schedule = schedule.sampled(sampler)
                folds.append((1, sampler))
                counter += 1
    return schedule, folds


@given(schedules())
def test_folds_give_back_what_was_recorded(case):
    schedule, folds = case
    listed = list(schedule.folds(0, schedule.tokens))
    assert [(length, sampler) for _, length, sampler in listed] == folds
    assert schedule.tokens == sum(length for length, _ in folds)
    position = 0
    for start, length, _ in listed:
        assert start == position
        position += length


@given(schedules(), st.data())
def test_a_cut_is_a_prefix(case, data):
    schedule, _ = case
    target = data.draw(st.integers(0, schedule.tokens))
    cut = schedule.cut(target)
    assert cut.tokens == target
    assert list(cut.folds(0, target)) == list(schedule.folds(0, target))


@given(schedules(), st.data())
def test_folds_from_a_border(case, data):
    schedule, _ = case
    borders = [0, *[start + length for start, length, _ in schedule.folds(0, schedule.tokens)]]
    start = data.draw(st.sampled_from(borders))
    expected = [f for f in schedule.folds(0, schedule.tokens) if f[0] >= start]
    assert list(schedule.folds(start, schedule.tokens)) == expected


@given(schedules())
def test_json_round_trip(case):
    host = HostState(schedule=case[0], turns=((0, 'empty'), (5, 'message')), turn='assistant_open',
                     role='assistant', detokenizer={'pending': 'e2'}, held='ab', tail=(1, 2))
    assert HostState.from_json(host.to_json()) == host


def test_pure_grid():
    schedule = Schedule().appended(512).appended(512)
    assert schedule.pure_grid(512) == 1024
    assert schedule.appended(3).pure_grid(512) == 1024
    assert schedule.appended(3).appended(512).pure_grid(512) == 1024
    assert Schedule().appended(3).appended(509).appended(512).pure_grid(512) == 0
    assert Schedule().pure_grid(512) == 0


def test_generated_tokens_stay_one_run():
    schedule = Schedule().appended(100)
    for counter in range(1000):
        schedule = schedule.sampled((*SAMPLER[:4], counter))
    assert len(schedule.runs) == 2
