"""report.html: one file with tables and pictures, which needs neither a script nor another host."""

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

INK = "#1f2328"  # text and lines of pictures; the page puts its own colour there
Rows = Sequence[Sequence[str]]
Key = tuple[str, str, str]  # (name of a curve, its colour, its stroke-dasharray)


def write_page(
    path: Path, title: str, notes: Sequence[str], differences: Rows, summary: Rows,
    pictures: Mapping[str, Sequence[str]], keys: Sequence[Key],
) -> Path:  # fmt: skip
    """Tables have a head; no `differences`, no such table. `pictures`: SVG by axis, of which the reader chooses one."""
    lines = "".join(
        f'<li><svg viewBox="0 0 32 8"><path d="M0 4H32" stroke="{colour}" stroke-dasharray="{dashes}"/></svg>'
        f"{escape(name)}</li>"
        for name, colour, dashes in keys
    )
    tabs = shown = ""
    for n, axis in enumerate(pictures):
        chosen = " checked" * (n == 0)
        tabs += f'<label><input type="radio" name="axis" id="axis-{n}"{chosen}>{escape(axis)}</label>'
        shown += f"body:has(#axis-{n}:not(:checked)) #pictures-{n} {{ display: none; }}\n"
    grids = (
        f'<div class="pictures" id="pictures-{n}">{"".join(map(_figure, each))}</div>'
        for n, each in enumerate(pictures.values())
    )
    text = Template(Path(__file__).with_name("page.html").read_text()).substitute(
        differences="<h2>Differences of the configs</h2>" + _table(differences) if differences else "",
        summary=_table(summary),
        title=escape(title),
        notes="".join(f"<p>{escape(note)}</p>" for note in notes),
        keys=lines and f'<ul class="keys">{lines}</ul>',
        shown=shown,
        pictures=tabs + "".join(grids),
    )
    path.write_text(text)
    return path


def _table(rows: Rows) -> str:
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{body}</table></div>'


def _figure(svg: str) -> str:
    """The SVG in the size of its place; the page's text colour takes the place of INK."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg.replace(INK, "currentColor"), flags=re.DOTALL)
    svg = re.sub(r'^.*?<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 role="img">', svg, count=1, flags=re.DOTALL)
    return f"<figure>{svg}</figure>"
