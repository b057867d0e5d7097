"""The C++ package for BehaviorTree.CPP and Nav2, held against the generated interfaces."""

from pathlib import Path
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from flashrt_ros.action import Generate
from flashrt_ros.msg import ErrorCode
from flashrt_ros.srv import RestoreCapsule, Rollback, SaveCapsule

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / 'examples' / 'behaviortree_cpp'
pytestmark = pytest.mark.skipif(
    not PACKAGE.is_dir(), reason='the folder examples is not installed')

KINDS = {'GenerateAction': Generate, 'SaveCapsuleService': SaveCapsule,
         'RestoreCapsuleService': RestoreCapsule, 'RollbackService': Rollback}
TYPES = {'string': 'std::string', 'boolean': 'bool', 'double': 'double', 'int32': 'int32_t',
         'uint8': 'uint8_t', 'uint16': 'uint16_t', 'uint32': 'uint32_t', 'uint64': 'uint64_t'}
BASIC = {'server_name', 'service_name', 'server_timeout'}  # ports of the bases
# Nodes of Nav2 and BehaviorTree.CPP that the tree may use, with the attributes that it may give.
OTHERS = {'root': {'BTCPP_format', 'main_tree_to_execute'}, 'BehaviorTree': {'ID'},
          'Sequence': {'name'}, 'Fallback': {'name'}, 'RetryUntilSuccessful': {'num_attempts'},
          'ForceFailure': set(), 'NavigateToPose': {'goal'}}


def headers():
    return ''.join(path.read_text() for path in sorted(PACKAGE.glob('include/**/*.hpp')))


def classes():
    """Return the C++ text of each node class by name."""
    parts = re.split(r'\nclass (\w+)\s*:', headers())
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def registered():
    """Return the class by the name that the plugin registers."""
    text = (PACKAGE / 'src' / 'register_nodes.cpp').read_text()
    pairs = re.findall(r'register_service<[\w:]*?(\w+)>\(\s*factory, "(\w+)", "([\w/]+)"', text)
    pairs += re.findall(r'registerBuilder<(\w+)>\("(\w+)"', text)
    return {pair[1]: pair[0] for pair in pairs}, text


def ports(text, direction):
    """Return the C++ type of each port by name."""
    return {name: kind for kind, name in re.findall(
        direction + r'Port<([\w:]+)>\(\s*"(\w+)"', text)}


def request_of(kind):
    return kind.Goal if kind is Generate else kind.Request


def response_of(kind):
    return kind.Result if kind is Generate else kind.Response


def field_type(message, path):
    """Return the interface type of a field, by the path of its name."""
    head, _, rest = path.partition('.')
    kind = message.get_fields_and_field_types()[head]
    if not rest:
        return kind
    return field_type(type(getattr(message(), head)), rest)


@pytest.mark.parametrize('name', sorted(KINDS))
def test_inputs(name):
    text, request = classes()[name], request_of(KINDS[name])
    inputs = ports(text, 'Input')
    used = re.findall(r'getInput\("(\w+)", ([\w.>-]+)\)', text)
    assert {port for port, _ in used} == inputs.keys()
    for port, target in used:
        match = re.fullmatch(r'(?:goal_\.|request_->)([\w.]+)', target)
        if match:
            assert TYPES[field_type(request, match[1])] == inputs[port], (port, target)
        else:
            assert re.search(rf'\b{inputs[port]} {target}\b', text), (port, target)
    # Everything else that is written into the request.
    for path in re.findall(r'(?:goal_\.|request_->)([\w.]+)', text):
        field_type(request, path)


@pytest.mark.parametrize('name', sorted(KINDS))
def test_outputs(name):
    text, response = classes()[name], response_of(KINDS[name])
    outputs = ports(text, 'Output')
    used = re.findall(r'setOutput\("(\w+)", (?:result_\.result|response)->([\w.]+)\)', text)
    assert {port for port, _ in used} == outputs.keys()
    for port, path in used:
        assert TYPES[field_type(response, path)] == outputs[port], (port, path)
    assert {'error_code_id', 'error_msg'} <= outputs.keys()
    assert set(re.findall(r'setOutput\("(\w+)"', text)) == outputs.keys()


@pytest.mark.parametrize('name', sorted(KINDS))
def test_constants(name):
    text, kind = classes()[name], KINDS[name]
    used = re.findall(r'::(Goal|Result|Request|Response)::([A-Z]\w*)\b', text)
    assert used
    for part, constant in used:
        assert isinstance(getattr(getattr(kind, part), constant), int), (part, constant)
    for constant in ('NONE', 'TIMEOUT', 'UNKNOWN', 'GOAL_REJECTED', 'SEND_GOAL_FAILURE'):
        # What Nav2 looks for in the type itself.
        assert getattr(response_of(kind), constant) == getattr(ErrorCode, constant)


def test_a_code_is_a_failure():
    for name, text in classes().items():
        if name == 'GenerateAction':
            # The base's on_cancelled returns SUCCESS.
            assert re.search(r'on_cancelled\(\) override \{return finish\(BT::NodeStatus::FAILURE',
                             text)
        else:
            assert re.search(r'error_code == Service::Response::NONE \?\s+'
                             r'BT::NodeStatus::SUCCESS : BT::NodeStatus::FAILURE', text), name


def test_everything_is_registered():
    names, text = registered()
    assert set(names.values()) == set(KINDS) == set(classes())
    from flashrt_ros.behaviours.call import SERVICES
    for service in re.findall(r'"flashrt/(\w+)"', text):
        assert service == 'generate' or service in SERVICES
        assert service.replace('_', '') in {
            name.removeprefix('Flashrt').lower() for name in names}


@pytest.mark.parametrize('path', sorted(PACKAGE.glob('trees/*.xml')), ids=lambda path: path.stem)
def test_trees(path):
    root = ElementTree.parse(path).getroot()
    assert root.get('BTCPP_format') == '4'
    trees = {tree.get('ID') for tree in root.findall('BehaviorTree')}
    assert root.get('main_tree_to_execute') in trees
    names, _ = registered()
    seen = set()
    for node in root.iter():
        if node.tag in OTHERS:
            assert set(node.attrib) <= OTHERS[node.tag], node.tag
            continue
        text = classes()[names[node.tag]]
        inputs, outputs = ports(text, 'Input'), ports(text, 'Output')
        seen.add(node.tag)
        for port, value in node.attrib.items():
            assert port in inputs or port in outputs or port in BASIC | {'name'}, (node.tag, port)
            if port in outputs:
                assert re.fullmatch(r'\{\w+\}', value), (node.tag, port)
            elif inputs.get(port, '').startswith(('int', 'uint', 'double')) and '{' not in value:
                float(value)
            elif inputs.get(port) == 'bool' and '{' not in value:
                assert value in ('true', 'false')
    assert seen == set(names)  # the trees show every node


def test_package_files_agree():
    package = ElementTree.parse(PACKAGE / 'package.xml').getroot()
    name = package.findtext('name')
    cmake = (PACKAGE / 'CMakeLists.txt').read_text()
    assert f'project({name})' in cmake
    depends = {node.text for node in package.findall('depend')}
    assert depends | {'ament_cmake'} == set(re.findall(r'find_package\((\w+) REQUIRED\)', cmake))
    library = re.search(r'add_library\((\w+) SHARED (\S+)\)', cmake)
    assert (PACKAGE / library[2]).is_file()
    assert f'plugin_lib_names: [{library[1]}]' in (PACKAGE / 'README.md').read_text()


def test_it_compiles_against_the_generated_headers():
    # With stand-ins for Nav2 and BehaviorTree.CPP, which are not here; with the true interfaces.
    generated = sorted(ROOT.glob('build/*-stage/include/flashrt_ros'))
    prefix = Path(sys.prefix) / 'include'
    compiler = shutil.which('c++')
    if not (generated and compiler and (prefix / 'rosidl_runtime_cpp').is_dir()):
        pytest.skip('no compiler, or no generated C++ headers, here')
    command = [compiler, '-std=c++17', '-Wall', '-Wextra', '-Werror', '-fsyntax-only',
               f'-I{PACKAGE / "include"}', f'-I{PACKAGE / "test" / "stand_ins"}',
               f'-isystem{generated[-1]}']
    command += [f'-isystem{folder}' for folder in sorted(prefix.iterdir()) if folder.is_dir()]
    done = subprocess.run([*command, str(PACKAGE / 'src' / 'register_nodes.cpp')],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_demo_launch():
    pytest.importorskip('launch_ros', reason='launch_ros comes with ROS 2, not from PyPI')
    from launch.launch_description_sources import PythonLaunchDescriptionSource

    from launch import LaunchContext
    source = PythonLaunchDescriptionSource(str(ROOT / 'launch' / 'demo.launch.py'))
    arguments = source.get_launch_description(LaunchContext()).get_launch_arguments()
    assert {'tree', 'fail', 'namespace'} <= {argument.name for argument in arguments}
    assert all(argument.description for argument in arguments)
