"""report.html: one file with tables and pictures, which needs neither a script nor another host."""

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

INK = "#1f2328"  # text and lines of pictures; the page puts its own colour there
Rows = Sequence[Sequence[str]]


def write_page(
    path: Path, title: str, notes: Sequence[str], differences: Rows, summary: Rows, pictures: Mapping[str, str]
) -> Path:
    """Tables have a head; without `differences` there is no such table. `pictures`: SVG by axis; the reader chooses."""
    tabs = figures = shown = ""
    for n, (axis, svg) in enumerate(pictures.items()):
        chosen = " checked" * (n == 0)
        tabs += f'<label><input type="radio" name="axis" id="axis-{n}"{chosen}>{escape(axis)}</label>'
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg.replace(INK, "currentColor"), flags=re.DOTALL)
        svg = re.sub(r'^.*?<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 role="img">', svg, count=1, flags=re.DOTALL)
        figures += f'<figure class="wide" id="picture-{n}">{svg}</figure>'
        shown += f"body:has(#axis-{n}:not(:checked)) #picture-{n} {{ display: none; }}\n"
    text = Template(Path(__file__).with_name("page.html").read_text()).substitute(
        title=escape(title),
        notes="".join(f"<p>{escape(note)}</p>" for note in notes),
        differences="<h2>Differences of the configs</h2>" + _table(differences) if differences else "",
        summary=_table(summary),
        shown=shown,
        pictures=tabs + figures,
    )
    path.write_text(text)
    return path


def _table(rows: Rows) -> str:
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{body}</table></div>'
