"""Draw docs/images/packages.svg, the packages of torchhooks in rows, from the layers in pyproject.toml.

python docs/images/packages.py
"""

from __future__ import annotations

import ast
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
WIDTH, ROW, GAP, BOX = 960, 76, 12, 60  # in pixels
LONGEST = 50  # characters in the smallest box


def about(name: str) -> str:
    """Return the first sentence of the docstring of the package or module ``name``."""
    path = ROOT / "torchhooks" / name
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = " ".join((ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or "").split())
    first = text.partition(". ")[0].partition(": ")[0].rstrip(".").replace("``", "")
    return first if len(first) <= LONGEST else first.partition(",")[0]


def svg(rows: list[list[str]]) -> str:
    height = len(rows) * ROW + GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif"',
        'text-anchor="middle">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, row in enumerate(rows):
        width = (WIDTH - GAP) / len(row) - GAP
        for column, name in enumerate(row):
            x, y = GAP + column * (width + GAP), GAP + number * ROW
            middle = x + width / 2
            lines += [
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BOX}" rx="6" fill="#eef" stroke="#4a6fa5"/>',
                f'<text x="{middle:.1f}" y="{y + 25}" font-size="17" font-weight="bold">{name}</text>',
                f'<text x="{middle:.1f}" y="{y + 46}" font-size="11">{escape(about(name))}</text>',
            ]
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract, *_ = project["tool"]["importlinter"]["contracts"]
    rows = [layer.split(" | ") for layer in contract["layers"]]
    (Path(__file__).parent / "packages.svg").write_text(svg(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
