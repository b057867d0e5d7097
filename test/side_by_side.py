"""Which tests go to which of several processes (`make test`); needs pytest-xdist."""

from xdist.scheduler import LoadScopeScheduling

# Files whose tests talk to nodes over DDS, by how they begin.
NODES = ('test_behaviours_', 'test_cli_bench_ros', 'test_cli_call', 'test_cli_demo',
         'test_config_examples', 'test_node_', 'test_soak_')


class NodesApart(LoadScopeScheduling):
    """
    Whole files, longest file first; all that start nodes as if they were one file.

    So one process has all nodes, and no two tests that wait for an answer of theirs wait at a time:
    each has a core for its node as if the tests ran alone.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition('::')[0]
        return 'nodes' if file.rpartition('/')[2].startswith(NODES) else file
