"""
/diagnostics, by the conventions of diagnostic_updater.

``diagnostic_updater`` has no wheel, and its part is small: status names begin with the node's
fully qualified name, the worst finding sets the level, values are strings.
"""

from __future__ import annotations

import os
from typing import Any, TYPE_CHECKING

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue

from flashrt_ros.node import convert
from flashrt_ros.node.scheduling import describe

if TYPE_CHECKING:
    from flashrt_ros.node.node import CapsuleNode

PERIOD = 1.0
_OK, _WARN, _ERROR = DiagnosticStatus.OK, DiagnosticStatus.WARN, DiagnosticStatus.ERROR


class Diagnostics:
    """
    Publishes what a person who looks after the robot wants to know, once a second.

    :param node: gives parameters, statistics, goals and the runtime.
    """

    def __init__(self, node: CapsuleNode) -> None:
        self._node = node
        self._publisher = node.create_publisher(DiagnosticArray, '/diagnostics', 10)
        self._resident_at_start = 0
        self.stall = ''

    def mark(self) -> None:
        """Take the memory of now as the level that growth counts from."""
        self._resident_at_start = resident_bytes()
        self.stall = ''

    def publish(self) -> None:
        """Publish all statuses. On the publishing thread."""
        message = DiagnosticArray(status=[
            self._runtime(), self._latency(), self._memory(), self._requests(), self._stall()])
        message.header.stamp = self._node.get_clock().now().to_msg()
        self._publisher.publish(message)

    def _status(self, name: str, values: dict[str, Any], findings: list[tuple[bytes, str]],
                healthy: str) -> DiagnosticStatus:
        level = max((found[0] for found in findings), default=_OK)
        words = '; '.join(found[1] for found in findings if found[0] == level) or healthy
        return DiagnosticStatus(
            name=f'{self._node.get_fully_qualified_name()}: {name}',
            hardware_id=convert.text(self._hardware()),
            level=level, message=convert.text(words),
            values=[KeyValue(key=key, value=convert.text(value)) for key, value in values.items()])

    def _hardware(self) -> str:
        """Return the device, told apart by the robot: 'robot1/cpu', without a namespace 'cpu'."""
        return '/'.join(part for part in (self._node.get_namespace().strip('/'),
                                          self._node.hardware) if part)

    def _judge(self, name: str, value: float, words: str) -> list[tuple[bytes, str]]:
        """Compare a value with its two thresholds; 0 switches one off."""
        for level, kind in ((_ERROR, 'error'), (_WARN, 'warn')):
            limit = self._node.parameters[f'{kind}.{name}']
            if 0 < limit < value:
                return [(level, f'{words} is {value:.4g}, above {kind}.{name} ({limit:.4g})')]
        return []

    def _runtime(self) -> DiagnosticStatus:
        node = self._node
        values: dict[str, Any] = {'lifecycle': node.lifecycle}
        facts = node.facts
        for key in ('model', 'dtype', 'device', 'context', 'fingerprint', 'load_seconds'):
            if key in facts:
                values[key] = facts[key]
        findings = [(_ERROR, node.failure)] if node.failure else []
        runtime = node.runtime
        if runtime is not None:
            values['thread that computes'] = describe(runtime.worker.thread_id)
            values['other threads'] = describe(os.getpid())
            if runtime.scheduling.refused:
                findings.append((_WARN, runtime.scheduling.refused))
        return self._status('runtime', values, findings, node.lifecycle)

    def _latency(self) -> DiagnosticStatus:
        values: dict[str, Any] = {}
        quantiles = self._node.statistics.quantiles()
        for name, (median, tail, count) in quantiles.items():
            values[f'{name} p50 (ms)'] = f'{median * 1e3:.3f}'
            values[f'{name} p99 (ms)'] = f'{tail * 1e3:.3f}'
            values[f'{name} count'] = count
        findings = self._judge('inter_token_p99', quantiles['inter_token'][1], 'inter-token p99')
        findings += self._judge('restore_p99', quantiles['restore'][1], 'restore p99')
        return self._status('latency', values, findings, 'within limits')

    def _memory(self) -> DiagnosticStatus:
        facts = self._node.facts
        resident = resident_bytes()
        growth = resident - self._resident_at_start if self._resident_at_start else 0
        values: dict[str, Any] = {'resident bytes': resident, 'growth since activate': growth}
        for key in ('arena_bytes', 'pool_bytes', 'pool_used_bytes'):
            if key in facts:
                values[key] = facts[key]
        use = facts.get('pool_used_bytes', 0) / max(1, facts.get('pool_bytes', 1))
        findings = self._judge('pool_use', use, 'the share of the capsule pool in use')
        findings += self._judge('growth_bytes', growth, 'growth since activate')
        if facts.get('disk_fault'):
            findings.append((_ERROR, facts['disk_fault']))
        return self._status('memory', values, findings, 'within limits')

    def _requests(self) -> DiagnosticStatus:
        node = self._node
        values: dict[str, Any] = {
            'open goals': len(node.goals), 'waiting goals': node.goals.waiting(),
            'tokens': node.statistics.tokens, 'messages published': node.outbox.published,
            'stream overruns': node.outbox.overruns}
        for outcome, count in sorted(node.statistics.outcomes.copy().items()):
            values[outcome] = count
        findings = []
        if node.outbox.overruns:
            findings.append((_WARN, f'{node.outbox.overruns} messages were dropped before '
                             'publishing: raise stream.depth or lower stream.max_rate_hz'))
        return self._status('requests', values, findings, 'no overruns')

    def _stall(self) -> DiagnosticStatus:
        quiet = self._node.quiet_seconds()
        values = {'seconds since the last token or chunk': f'{quiet:.3f}',
                  'last stall': self.stall or 'none'}
        limit = self._node.parameters['timeouts.stall']
        findings = []
        if 0 < limit < quiet:
            findings.append((_ERROR, f'busy, and nothing came for {quiet:.1f} s'))
        return self._status('stall', values, findings, 'none')


def resident_bytes() -> int:
    """Return the resident size of this process, 0 where the system does not tell."""
    try:
        with open('/proc/self/statm', encoding='ascii') as file:
            return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')
    except (OSError, ValueError, IndexError):
        return 0

