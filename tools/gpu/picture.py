"""
Draw where a decode step spends its time, from the JSON that check.py wrote.

    python tools/gpu/picture.py results/check.json step.svg
"""

from __future__ import annotations

import json
from pathlib import Path
import sys

COLOURS = {'gemv': '#4a7ab5', 'head': '#355a86', 'delta': '#d08a3c', 'attend': '#6a9a4f',
           'join': '#93bf7a', 'sample': '#a05a8c'}
WIDTH, BAR, LEFT = 900, 26, 250


def rows_of(results: dict) -> list[tuple[str, dict[str, dict]]]:
    return [(name.removeprefix('parts '), parts) for name, parts in results.items()
            if name.startswith('parts ') and 'error' not in parts]


def draw(results: dict) -> str:
    """Return an SVG: per model, one bar a kind of launch, longest first."""
    lines, y = [], 20
    for model, parts in rows_of(results):
        total = sum(p['each_us'] * p['count'] for p in parts.values())
        ordered = sorted(parts.items(), key=lambda item: -item[1]['each_us'] * item[1]['count'])
        longest = ordered[0][1]['each_us'] * ordered[0][1]['count']
        lines.append(f'<text x="10" y="{y}" font-weight="bold">{model}: {total:.0f} µs in '
                     'launches of one step at position 4096</text>')
        y += 14
        for name, part in ordered:
            time = part['each_us'] * part['count']
            colour = COLOURS.get(name.split()[0], '#888888')
            speed = f', {part["tb_s"]} TB/s' if 'tb_s' in part else ''
            width = time / longest * (WIDTH - LEFT - 260)
            lines.append(
                f'<text x="{LEFT - 8}" y="{y + 17}" text-anchor="end">{name}</text>'
                f'<rect x="{LEFT}" y="{y + 3}" width="{width:.1f}" height="{BAR - 6}" '
                f'fill="{colour}"/><text x="{LEFT + width + 6:.1f}" y="{y + 17}">{time:.0f} µs = '
                f'{part["count"]} x {part["each_us"]}{speed}</text>')
            y += BAR
        y += 24
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" '
            'font-family="sans-serif" font-size="13">'
            f'<rect width="{WIDTH}" height="{y}" fill="white"/>\n{chr(10).join(lines)}\n</svg>\n')


if __name__ == '__main__':
    Path(sys.argv[2]).write_text(draw(json.loads(Path(sys.argv[1]).read_text())['results']),
                                 encoding='utf-8')
