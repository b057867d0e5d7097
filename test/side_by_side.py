"""Which tests go to which of several processes (`make test`); needs pytest-xdist."""

from xdist.scheduler import LoadScopeScheduling

# Files whose tests expect something of nodes in time, by how they begin. Those that drive a node
# through the command line have time, and run anywhere: test_cli_call.py, test_cli_demo.py.
NODES = ('test_behaviours_', 'test_cli_bench_ros', 'test_config_examples', 'test_node_',
         'test_soak_')


class NodesApart(LoadScopeScheduling):
    """
    Whole files, those with most tests first; all of NODES as if they were one file.

    So these run one after another in one process, as they would without a second one, which takes
    about a core meanwhile.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition('::')[0]
        return 'nodes' if file.rpartition('/')[2].startswith(NODES) else file
