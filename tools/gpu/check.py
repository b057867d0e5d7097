"""
Check and measure the CUDA device: correctness first, then speed; JSON to --out.

    python tools/gpu/check.py --out results --sections agrees,decode --models random:qwen3.5-0.8b
"""

from __future__ import annotations

import argparse
from functools import partial
import gc
import json
from pathlib import Path
import sys
import time
import traceback

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import bench  # noqa: E402
import common  # noqa: E402
import correctness  # noqa: E402
import torch  # noqa: E402

from flashrt_ros.cuda import decode  # noqa: E402

RIGHT = ('agrees', 'oracle', 'graph', 'capture', 'sampler', 'lineage', 'stream', 'stable')
#: sections that are checks of `flashrt-ros verify`
CONTRACT = {'graph': 'graph_equals_eager', 'capture': 'capture_side_effect_free',
            'lineage': 'lineage', 'stream': 'stream_ordered_save', 'stable': 'stable_addresses'}
FAST = ('ahead', 'decode', 'blocks', 'parts', 'prefill', 'profile', 'capsules', 'first_token')


def measure(spec: str, context: int, sections: list[str], run) -> None:
    model, plan = common.build(spec, 'bfloat16', context)
    works = {
        'ahead': lambda: bench.ahead(model, context),
        'decode': lambda: bench.decode(model, plan),
        'blocks': lambda: bench.blocks(plan),
        'parts': lambda: bench.parts(model, plan),
        'prefill': lambda: bench.prefill(plan),
        'profile': lambda: {f'{name} at {position}': bench.profile(plan, name, position)
                            for name, position in (('step', 4096), (32, 4096), (512, 4096),
                                                   (512, 15872))},
        'capsules': lambda: bench.capsules(plan),
        'first_token': lambda: bench.first_token(plan),
    }
    for name, work in works.items():
        if name in sections:
            run(f'{name} {spec}', work)


def use_tilings(path: Path) -> None:
    best = json.loads(path.read_text())['best']
    usual = decode.tiling

    def tiling(rows: int, depth: int, vector: int, epilogue: int,
               tokens: int = 1) -> tuple[int, int, int, int]:
        found = best.get(f'{rows} {depth // vector} {int(epilogue == decode.SWIGLU)}')
        if found and tokens == 1:
            return (*found, 256)
        return usual(rows, depth, vector, epilogue, tokens)

    decode.tiling = tiling


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--out', default='results')
    parser.add_argument('--sections', default=','.join((*RIGHT, *FAST)))
    parser.add_argument('--models', default='random:qwen3.5-0.8b')
    parser.add_argument('--small', default='random:tiny,random:small')
    parser.add_argument('--context', type=int, default=16384 + 1024)
    parser.add_argument('--sweep', default='', help='use the best tilings that sweep.py wrote')
    args = parser.parse_args()
    if args.sweep:
        use_tilings(Path(args.sweep))
    sections = args.sections.split(',')
    report: dict = {'device': torch.cuda.get_device_name(), 'torch': torch.__version__,
                    'cuda': torch.version.cuda, 'results': {}}
    begin, failed = time.monotonic(), 0
    Path(args.out).mkdir(parents=True, exist_ok=True)

    def run(name: str, work) -> None:
        nonlocal failed
        started = time.monotonic()
        try:
            result = work()
        except Exception as error:
            result = {'ok': False, 'error': f'{type(error).__name__}: {str(error)[:1500]}',
                      'trace': traceback.format_exc().splitlines()[-7:]}
        failed += isinstance(result, dict) and result.get('ok') is False
        report['results'][name] = result
        print(f'[{time.monotonic() - begin:5.1f} s, {time.monotonic() - started:4.1f} s] {name}: '
              f'{json.dumps(result)[:2400]}', flush=True)
        Path(args.out, 'check.json').write_text(json.dumps(report, indent=1))
        gc.collect()
        torch.cuda.empty_cache()

    small = [spec for spec in args.small.split(',') if spec]
    for spec in small:
        for dtype in ('float32', 'bfloat16'):
            if 'agrees' in sections:
                run(f'agrees {spec} {dtype}', partial(correctness.agrees, spec, dtype))
            names = [CONTRACT[part] for part in sections if part in CONTRACT]
            if names:
                run(f'contract {spec} {dtype}',
                    partial(correctness.contract, spec, dtype, names))
    if small and 'oracle' in sections:
        run('oracle', lambda: correctness.oracle(small[-1], 'float32'))
    for spec in [spec for spec in args.models.split(',') if spec]:
        if 'agrees' in sections:
            run(f'agrees {spec}', lambda spec=spec: correctness.agrees(spec, 'bfloat16'))
        if 'graph' in sections:
            run(f'graph {spec}', lambda spec=spec: correctness.contract(
                spec, 'bfloat16', ['graph_equals_eager']))
        if 'oracle' in sections:
            run(f'oracle {spec}', lambda spec=spec: correctness.oracle(spec, 'bfloat16'))
        if 'drafts' in sections:
            run(f'drafts {spec}', lambda spec=spec: correctness.drafts(spec, 'bfloat16'))
        if 'sampler' in sections:
            run(f'sampler {spec}', lambda spec=spec: correctness.sampler(spec))
        if set(FAST) & set(sections):
            try:
                measure(spec, args.context, sections, run)
            except Exception:
                run(f'build {spec}', lambda: {'ok': False, 'error': traceback.format_exc()[-900:]})
            gc.collect()
            torch.cuda.empty_cache()
    print(f'{failed} failed')
    return failed


if __name__ == '__main__':
    sys.exit(main())
