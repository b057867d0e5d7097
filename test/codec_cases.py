"""Manifests, images and ways to damage a capsule file, shared by the tests of the files."""

from __future__ import annotations

from collections.abc import Callable
import json
from pathlib import Path

from blake3 import blake3
import torch

from flashrt_ros.arena import Arena, Buffer, Manifest, Role
from flashrt_ros.capsule.codec import Header, Image
from flashrt_ros.capsule.wire import gaps

POSITIONS = (0, 1, 63, 64, 1000)


def manifests() -> dict[str, Manifest]:
    rows, fixed = Role.ROWS, Role.BOUNDARY
    ids = Buffer('ids', rows, torch.int32, (1,))
    return {
        'fp32': Manifest([
            ids, Buffer('layer0.k', rows, torch.float32, (2, 8)),
            Buffer('layer0.v', rows, torch.float32, (2, 8)),
            Buffer('logits', fixed, torch.float32, (101,)),
            Buffer('layer1.state', Role.RECURRENT, torch.float32, (3, 4, 5)),
            Buffer('layer1.conv', Role.CONV, torch.float32, (7, 3)),
            Buffer('tmp', Role.SCRATCH, torch.float32, (64,))]),
        'bf16': Manifest([
            ids, Buffer('k', rows, torch.bfloat16, (4, 4)),
            Buffer('v', rows, torch.bfloat16, (4, 4)),
            Buffer('long', rows, torch.int64, (4,)),  # the same plane as k and v
            Buffer('flag', rows, torch.bool, (3,)),
            Buffer('logits', fixed, torch.float32, (33,)),
            Buffer('odd', fixed, torch.uint8, (5,))]),
        'one-plane': Manifest([Buffer('a', rows, torch.int64, (2,)),
                               Buffer('b', rows, torch.float32, (4,))]),
        'no-rows': Manifest([Buffer('pose', Role.RECURRENT, torch.float64, (6,))]),
    }


def small() -> Manifest:
    return manifests()['fp32']


def arena(manifest: Manifest, position: int, seed: int = 0) -> Arena:
    """Make an arena full of random bytes, padding zero, somewhat larger than needed."""
    result = Arena(manifest, position + 13)
    result.storage.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    for start, end in gaps(manifest):
        result.fixed[start:end] = 0
    for buffer in manifest.buffers:
        if buffer.dtype is torch.bool:
            result[buffer.name].view(torch.uint8).bitwise_and_(1)
    result.set_position(position)
    return result


def header(manifest: Manifest, position: int, name: str = 'scene', **fields) -> Header:
    return Header(**{
        'id': 'c0ffee', 'name': name, 'position': position, 'manifest': manifest.describe(),
        'fingerprint': {'hard': {'weights': 'w'}, 'soft': {'threads': 2}},
        'host': {'schedule': [[512, 1, None]], 'held': 'é\U0001f916', 'f': 0.1}, 'parent_id': '',
        'session': 'default', 'created': 1700000000.25, 'note': 'a note – ünïcode', **fields})


def image(manifest: Manifest, position: int, seed: int = 0, name: str = 'scene', **fields
          ) -> Image:
    live = arena(manifest, position, seed)
    return Image(header(manifest, position, name, **fields), live.fixed,
                 {b.name: live[b.name][:position] for b in manifest.rows})


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_equal(one: Image, other: Image) -> None:
    assert raw(one.fixed) == raw(other.fixed)
    assert one.rows.keys() == other.rows.keys()
    for name, rows in one.rows.items():
        assert rows.shape == other.rows[name].shape and rows.dtype is other.rows[name].dtype
        assert raw(rows) == raw(other.rows[name]), name


def parts(path: Path) -> tuple[dict, bytes]:
    """Return the parsed safetensors header and the payload."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], 'little')
    return json.loads(data[8:end]), data[end:]


def seal(text: str) -> bytes:
    """Give a header text, whose digest is zeros, its right digest: a forger can, too."""
    key, zero = '"blake3":"', '0' * 64
    digest = blake3(text.encode()).hexdigest()
    text = text.replace(key + zero, key + digest, 1)
    return len(text.encode()).to_bytes(8, 'little') + text.encode()


def forge(path: Path, edit: Callable[[dict, dict], None], payload: bytes | None = None) -> None:
    """
    Rewrite a file with ``edit(table, our_header)`` applied and a right digest of the header.

    This separates the checks of meaning from the digest, which would catch any change.
    """
    table, old = parts(path)
    ours = json.loads(table['__metadata__']['header'])
    edit(table, ours)
    if '__metadata__' in table:
        table['__metadata__']['header'] = json.dumps(ours)
        table['__metadata__']['blake3'] = '0' * 64
    path.write_bytes(seal(json.dumps(table, separators=(',', ':')))
                     + (old if payload is None else payload))
