"""The examples in config/ and launch/: parsed, and held against a real node."""

import ast
import configparser
import contextlib
from pathlib import Path
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

import pytest

pytest.importorskip('rclpy')
yaml = pytest.importorskip('yaml')
sys.path.insert(0, str(Path(__file__).parent))

from ament_index_python.packages import get_package_share_directory  # noqa: E402
from node_cases import running, until  # noqa: E402

from flashrt_ros.node.parameters import PARAMETERS  # noqa: E402

SHARE = Path(get_package_share_directory('flashrt_ros'))
CONFIG = SHARE / 'config'
POLICY = ElementTree.parse(CONFIG / 'sros2_policy.xml').getroot()


@pytest.fixture(scope='module')
def peer(tmp_path_factory):
    with running(tmp_path_factory.mktemp('node')) as (_, peer):
        yield peer


def granted(enclave, kind, verb):
    """Return the full names that a policy grants to an enclave."""
    profile = POLICY.find(f"./enclaves/enclave[@path='{enclave}']/profiles/profile")
    assert profile.get('ns') == '/'
    names = set()
    for group in profile.findall(f'{kind}s'):
        assert set(group.attrib.values()) == {'ALLOW'}
        if verb in group.attrib:
            names |= {element.text for element in group.findall(kind)}
    node = profile.get('node')
    return {name.replace('~', f'/{node}') if name.startswith('~') else '/' + name.lstrip('/')
            for name in names}


def graph(peer, what, wanted):
    """Return the node's end points, those of actions first, once discovery has told of all."""
    ask = getattr(peer.node, f'get_{what}_names_and_types_by_node')
    found = []

    def settled():
        found.append(folded({name for name, _ in ask('flashrt', '/')}))
        return len(found) > 4 and found[-1] == found[-5] and wanted <= set().union(*found[-1])
    with contextlib.suppress(AssertionError):  # what is missing, who asked tells
        until(lambda: time.sleep(0.1) or settled())
    return found[-1]


def folded(names):
    """Split names into those of actions and all others."""
    actions = {name.partition('/_action/')[0] for name in names if '/_action/' in name}
    return actions, {name for name in names if '/_action/' not in name}


def test_policy_grants_the_node_what_it_has_and_no_more(peer):
    optional = {'/flashrt/get_type_description'}  # Kilted and newer
    replies = granted('/flashrt', 'service', 'reply')
    actions, services = graph(peer, 'service', replies - optional)
    assert services - replies == set()
    assert replies - services <= optional
    assert granted('/flashrt', 'action', 'execute') == actions == {'/flashrt/generate'}
    told = granted('/flashrt', 'topic', 'publish')
    assert graph(peer, 'publisher', told)[1] == told
    heard = granted('/flashrt', 'topic', 'subscribe') - {'/clock'}  # with use_sim_time only
    assert graph(peer, 'subscriber', heard)[1] - {'/clock'} == heard


@pytest.mark.parametrize('enclave', ['/flashrt_operator', '/flashrt_manager',
                                     '/flashrt_listener'])
def test_clients_are_granted_only_what_there_is(peer, enclave):
    requests, calls = granted(enclave, 'service', 'request'), granted(enclave, 'action', 'call')
    heard = granted(enclave, 'topic', 'subscribe') - {'/clock'}
    told = granted(enclave, 'topic', 'publish') - {'/rosout', '/parameter_events'}
    actions, services = graph(peer, 'service', requests | calls)
    assert requests <= services
    assert calls <= actions
    assert heard <= graph(peer, 'publisher', heard)[1]
    assert told <= graph(peer, 'subscriber', told)[1]
    if enclave == '/flashrt_listener':
        assert not requests | calls


def test_every_service_of_the_interface_is_the_operators(peer):
    wanted = {f'/flashrt/{re.sub("(?<=[a-z])(?=[A-Z])", "_", path.stem).lower()}'
              for path in (SHARE / 'srv').glob('*.srv')}
    assert wanted <= granted('/flashrt_operator', 'service', 'request')


def flat(tree, prefix=''):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f'{prefix}{key}.')
        else:
            yield prefix + key, value


@pytest.mark.parametrize('name', ['flashrt.yaml', 'robots.yaml'])
def test_parameter_files_name_parameters_that_exist(name):
    specs = {spec.name: spec for spec in PARAMETERS}
    document = yaml.safe_load((CONFIG / name).read_text())
    assert document
    for node, tree in document.items():
        assert node == '/**' or node.endswith('/flashrt')
        for key, value in flat(tree['ros__parameters']):
            assert key in specs and specs[key].refusal(value) == '', (key, value)


def test_robots_have_directories_of_their_own():
    document = yaml.safe_load((CONFIG / 'robots.yaml').read_text())
    folders = [tree['ros__parameters']['capsules']['directory']
               for node, tree in document.items() if node != '/**']
    assert len(folders) > 1 and len(set(folders)) == len(folders)


def test_lifecycle_manager_waits_for_a_load_and_for_no_bond():
    document = yaml.safe_load((CONFIG / 'nav2_lifecycle_manager.yaml').read_text())
    values = document['/**/lifecycle_manager_flashrt']['ros__parameters']
    assert values['node_names'] == ['flashrt']
    assert values['bond_timeout'] == 0.0 and isinstance(values['bond_timeout'], float)
    assert values['service_timeout'] >= 60.0
    text = (SHARE / 'launch' / 'nav2.launch.py').read_text()
    assert "'autostart': 'false'" in text and 'nav2_lifecycle_manager.yaml' in text


def unit():
    text = (CONFIG / 'flashrt.service').read_text().replace('\\\n', '')
    parser = configparser.RawConfigParser(strict=False, delimiters=('=',))
    parser.optionxform = str
    parser.read_string(text)
    return parser


def test_unit_says_how_the_node_ends():
    service = unit()['Service']
    command = service['ExecStart']
    assert 'capsule_node --ros-args' in command and 'ros2 run' not in command
    assert int(service['TimeoutStopSec']) > 65  # timeouts.cancel and persisting
    assert service['Restart'] == 'on-failure' and service['RestartPreventExitStatus'] == '2'
    assert 'PrivateIPC' not in service and 'PrivateDevices' not in service
    names = {spec.name for spec in PARAMETERS}
    given = dict(re.findall(r'-p ([\w.]+):=(\S+)', command))
    assert given and set(given) <= names
    assert given['capsules.directory'].startswith('/var/lib/' + service['StateDirectory'])


def test_command_of_the_unit_is_one_of_the_shell():
    words = unit()['Service']['ExecStart']
    script = re.fullmatch(r"/bin/bash -c '(.*)'", words)[1]
    assert subprocess.run(['bash', '-n', '-c', script], check=False).returncode == 0
    assert ' exec ' in f' {script}'.replace('&&', ' ')


@pytest.mark.parametrize('path', sorted((SHARE / 'launch').glob('*.launch.py')),
                         ids=lambda path: path.name)
def test_launch_files_describe_their_arguments(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree) and f'ros2 launch flashrt_ros {path.name}' in path.read_text()
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)
             and getattr(node.func, 'id', '') == 'DeclareLaunchArgument']
    assert calls
    for call in calls:
        assert 'description' in {keyword.arg for keyword in call.keywords}
