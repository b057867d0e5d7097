"""Behaviours around the simulated robot."""

from __future__ import annotations

import time

import py_trees
from py_trees.common import Access, Status

from flashrt_ros.behaviours.examples.world import parse, World


class CheckPlan(py_trees.behaviour.Behaviour):
    """
    Read the answer as skill calls.

    * :data:`~py_trees.common.Status.SUCCESS`: the calls are on the blackboard as `plan`
    * :data:`~py_trees.common.Status.FAILURE`: a line is no call of a known skill

    Args:
        name: the behaviour's name
        key: blackboard variable with the answer, as Generate writes it
    """

    def __init__(self, name: str, key: str = 'answer') -> None:
        super().__init__(name)
        self.key = key
        self.blackboard = self.attach_blackboard_client(name=name)
        self.blackboard.register_key(key=key, access=Access.READ)
        self.blackboard.register_key(key='plan', access=Access.WRITE)
        self.blackboard.register_key(key='plan_ready_at', access=Access.WRITE)

    def update(self) -> Status:
        """Parse."""
        try:
            plan = parse(self.blackboard.get(self.key).text)
        except ValueError as error:
            self.feedback_message = str(error)
            return Status.FAILURE
        self.blackboard.set('plan', plan)
        self.blackboard.set('plan_ready_at', time.monotonic())
        self.feedback_message = ', '.join(call['skill'] for call in plan)
        return Status.SUCCESS


class Execute(py_trees.behaviour.Behaviour):
    """
    Carry the plan out, one skill after the other.

    * :data:`~py_trees.common.Status.RUNNING`: a skill is under way
    * :data:`~py_trees.common.Status.SUCCESS`: all were carried out
    * :data:`~py_trees.common.Status.FAILURE`: a skill failed; the feedback message says which

    Args:
        name: the behaviour's name
        world: the simulated robot
        seconds: that a skill takes
    """

    def __init__(self, name: str, world: World, seconds: float = 0.1) -> None:
        super().__init__(name)
        self.world = world
        self.seconds = seconds
        self.blackboard = self.attach_blackboard_client(name=name)
        self.blackboard.register_key(key='plan', access=Access.READ)

    def initialise(self) -> None:
        """Begin with the first skill."""
        self._plan = list(self.blackboard.get('plan'))
        self._next = 0
        self._until = time.monotonic() + self.seconds

    def update(self) -> Status:
        """Look whether the present skill is over."""
        call = self._plan[self._next]
        words = ' '.join(call.values())
        self.feedback_message = f'{words} ({self._next + 1} of {len(self._plan)})'
        if time.monotonic() < self._until:
            return Status.RUNNING
        why = self.world.do(call)
        if why:
            self.feedback_message = f'{words}: {why}'
            return Status.FAILURE
        self._next += 1
        self._until = time.monotonic() + self.seconds
        return Status.SUCCESS if self._next == len(self._plan) else Status.RUNNING


class Drive(py_trees.behaviour.Behaviour):
    """
    Drive to a person, who says something on arrival.

    * :data:`~py_trees.common.Status.RUNNING`: under way
    * :data:`~py_trees.common.Status.SUCCESS`: arrived; the blackboard has `asked`, `arrived_at`

    Args:
        name: the behaviour's name
        world: the simulated robot
        to: where the person is
        asked: what the person says
        seconds: that the way takes
    """

    def __init__(self, name: str, world: World, to: str, asked: str, seconds: float) -> None:
        super().__init__(name)
        self.world, self.to, self.asked, self.seconds = world, to, asked, seconds
        self.blackboard = self.attach_blackboard_client(name=name)
        for key in ('asked', 'arrived_at'):
            self.blackboard.register_key(key=key, access=Access.WRITE)

    def initialise(self) -> None:
        """Set off."""
        self.blackboard.set('asked', '')
        self._begun = time.monotonic()

    def update(self) -> Status:
        """Look how far it is."""
        share = (time.monotonic() - self._begun) / self.seconds
        if share < 1.0:
            self.feedback_message = f'{int(share * 10) * 10} % of the way'
            return Status.RUNNING
        self.world.do({'skill': 'navigate', 'to': self.to})
        self.blackboard.set('asked', self.asked)
        self.blackboard.set('arrived_at', time.monotonic())
        self.feedback_message = f'arrived; hears: {self.asked}'
        return Status.SUCCESS


class AsGuessed(py_trees.behaviour.Behaviour):
    """
    Wait until the person has spoken.

    * :data:`~py_trees.common.Status.RUNNING`: nothing was said yet
    * :data:`~py_trees.common.Status.SUCCESS`: it was what was guessed
    * :data:`~py_trees.common.Status.FAILURE`: it was something else

    Args:
        name: the behaviour's name
        guess: what was guessed
    """

    def __init__(self, name: str, guess: str) -> None:
        super().__init__(name)
        self.guess = guess
        self.blackboard = self.attach_blackboard_client(name=name)
        self.blackboard.register_key(key='asked', access=Access.READ)

    def update(self) -> Status:
        """Compare."""
        asked = self.blackboard.get('asked') if self.blackboard.exists('asked') else ''
        if not asked:
            self.feedback_message = 'has a plan, waits'
            return Status.RUNNING
        self.feedback_message = 'as guessed' if asked == self.guess else 'something else'
        return Status.SUCCESS if asked == self.guess else Status.FAILURE
