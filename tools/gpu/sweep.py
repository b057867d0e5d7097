"""Time the one-token product over tilings, for the shapes of the large models."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
import json
from pathlib import Path
import sys

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import common  # noqa: E402
import torch  # noqa: E402

from flashrt_ros.cuda import compiler, decode  # noqa: E402
from flashrt_ros.cuda.driver import Launch, Toolbox  # noqa: E402

SHAPES = {  # rows, depth, prologue, epilogue
    '0.8b in': (8224, 1024, 1, 0), '0.8b out': (1024, 2048, 0, 1), '0.8b up': (7168, 1024, 1, 3),
    '0.8b down': (1024, 3584, 0, 1), '0.8b head': (248320, 1024, 1, 0),
    '9b in': (12352, 4096, 1, 0), '9b out': (4096, 4096, 0, 1), '9b up': (24576, 4096, 1, 3),
    '9b down': (4096, 12288, 0, 1), '9b head': (248320, 4096, 1, 0)}
TILINGS = [(1, 4), (1, 8), (2, 2), (2, 4), (2, 8), (4, 2), (4, 4)]
BLOCKS = (1, 2, 3, 4)


def defines(shape, together, unroll, blocks):
    rows, depth, prologue, epilogue = shape
    return {'K': depth, 'N': rows // 2 if epilogue == 3 else rows, 'ROWS': together,
            'UNROLL': unroll, 'BLOCKS': blocks, 'PROLOGUE': prologue, 'EPILOGUE': epilogue}


def main() -> None:
    tools = Toolbox(torch.device('cuda'), torch.bfloat16)
    jobs = []
    for name, shape in SHAPES.items():
        for together, unroll in TILINGS:
            if shape[3] == 3 and together == 1 or (unroll - 1) * 32 >= shape[1] // 8:
                continue
            for blocks in BLOCKS:
                if together * unroll * 2 * 4 + 40 > 65536 // 256 // blocks:
                    continue
                jobs.append((name, shape, together, unroll, blocks))
    with ThreadPoolExecutor(14) as pool:
        list(pool.map(lambda job: compiler.compile_source(
            'gemv.cu', {'ELEMENT': 16, **defines(*job[1:])}, tools.arch), jobs))
    watch, found = common.Stopwatch(5), {}
    weights: dict = {}
    for name, shape, together, unroll, blocks in jobs:
        rows, depth, prologue, epilogue = shape
        if name not in weights:
            weights.clear()
            copies = max(2, min(24, (600 << 20) // (rows * depth * 2)))
            weights[name] = [torch.randn(rows, depth, device='cuda').bfloat16()
                             for _ in range(copies)]
        x, out = torch.randn(depth, device='cuda'), torch.zeros(rows, device='cuda')
        kernel = tools.kernel('gemv.cu', 'gemv', **defines(shape, together, unroll, blocks))
        tasks = -(-rows // together)
        grid = decode.spread(-(-tasks // 8), tools.multiprocessors * blocks)
        launches = [Launch(kernel, (grid,), 256, (w, x, x, 1e-6, out, None, None, None, None,
                                                  None, *decode.NOTHING), shared=depth * 4)
                    for w in weights[name]]
        graph = common.captured(lambda launches=launches: [each() for each in launches])
        micros = watch(graph.replay) / len(launches)
        found.setdefault(name, []).append(
            (round(micros, 2), round(rows * depth * 2 / micros / 1e6, 2), together, unroll,
             blocks, grid))
    best = {}
    for name, rows in found.items():
        rows.sort()
        print(name, 'best', rows[:4], 'default', [
            r for r in rows if r[2:5] == decode.tiling(
                SHAPES[name][0], SHAPES[name][1], 8, SHAPES[name][3])[:3]])
        shape = SHAPES[name]
        best[f'{shape[0]} {shape[1] // 8} {int(shape[3] == 3)}'] = rows[0][2:5]
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    Path(sys.argv[1], 'sweep.json').write_text(json.dumps({'best': best, 'all': found}))


if __name__ == '__main__':
    main()
