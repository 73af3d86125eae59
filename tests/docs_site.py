"""Hooks of mkdocs.yml: what the documentation site has besides docs/.

Pages of docs/ link to files of the repository, such as configs and results. Those are copied to repository/ in the
site, and the links lead there, so the site is complete by itself. The reference of the commands comes from their
parsers, that of the Python API from docstrings and from the comments of fields.
"""

import argparse
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from launch.cli import GROUPS, build_parser

ROOT = Path(__file__).resolve().parents[1]
COPIES = "repository/"  # folder of the site for files outside of docs/
CLI = "cli.md"
LINK = re.compile(r"\[([^]]*)\]\((?!\w+:)([^)#\s]+)(?=[)#])")  # text and file
BLOCK = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)  # links in code stay as they are


def on_config(config: MkDocsConfig) -> None:
    """The examples that exist become pages of the section Train."""
    train = next(part["Train"] for part in config.nav or [] if "Train" in part)
    found = sorted(readme.relative_to(ROOT).as_posix() for readme in ROOT.glob("examples/**/README.md"))
    if found:
        train.append({"Examples": [COPIES + name for name in found]})


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the reference of the commands, and every file of the repository that a page needs."""
    files.append(File.generated(config, CLI, content=commands_page()))
    listed = [name.removeprefix(COPIES) for name in re.findall(rf"{COPIES}[\w./-]+", str(config.nav))]
    waiting = [*listed, *(f"docs/{file.src_uri}" for file in files.documentation_pages() if file.src_uri != CLI)]
    seen = set(waiting)
    while waiting:
        name = waiting.pop()
        if not name.startswith("docs/"):
            files.append(File.generated(config, COPIES + name, abs_src_path=str(ROOT / name)))
        for target in set(linked(name)) - seen:
            seen.add(target)
            waiting.append(target)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links of a page as they are in the site, where the title of a page stands for its file's name."""
    uri = page.file.src_uri
    folder = posixpath.dirname(uri)

    def moved(link: re.Match[str]) -> str:
        target = target_of(real(uri), link[2])
        if target is None:
            return link[0]
        text = title_of(target) if link[1].endswith(".md") and target.endswith(".md") else link[1]
        return f"[{text}]({posixpath.relpath(site_uri(target), folder or '.')}"

    return "".join(part if BLOCK.match(part) else LINK.sub(moved, part) for part in BLOCK.split(markdown))


def on_page_content(html: str, page: Page, files: Files, **_: Any) -> str:
    """Pages that docstrings and helps name, as docs/NAME.md, are links in the generated reference."""

    def link(named: re.Match[str]) -> str:
        found = files.get_file_from_path(named[1])
        return f'<a href="{found.url}">{named[0]}</a>' if found else named[0]

    return re.sub(r"\bdocs/([\w-]+\.md)\b", link, html) if page.file.src_uri in (CLI, "api.md") else html


def real(uri: str) -> str:
    """The repository's path of a file of the site."""
    return uri.removeprefix(COPIES) if uri.startswith(COPIES) else f"docs/{uri}"


def site_uri(name: str) -> str:
    """The site's path of a file of the repository."""
    return name.removeprefix("docs/") if name.startswith("docs/") else COPIES + name


def target_of(name: str, link: str) -> str | None:
    """The file to which a link of this file leads, of a folder its README; None if there is none."""
    found = posixpath.normpath(posixpath.join(posixpath.dirname(name), link))
    found = f"{found}/README.md" if (ROOT / found).is_dir() else found
    return found if (ROOT / found).is_file() else None


def linked(name: str) -> Iterator[str]:
    """Files to which a page links; none of a file that is no page."""
    if name.endswith(".md"):
        text = BLOCK.sub("", (ROOT / name).read_text())
        yield from filter(None, (target_of(name, link) for _, link in LINK.findall(text)))


def title_of(name: str) -> str:
    """The first heading of a page."""
    return (ROOT / name).read_text().partition("\n")[0].lstrip("# ")


def commands_page() -> str:
    """Markdown with the help of every command, in the groups of `slipstream --help`."""
    parser = build_parser()
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    parts = [
        "# Command line",
        "`slipstream COMMAND --help` prints the same. Words in capitals are explained in [Commands](commands.md).",
    ]
    for group, names in GROUPS.items():
        parts.append(f"## {group.capitalize()}")
        for name in names.split():
            one = commands.choices[name]
            one.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=100)
            parts.append(f"### slipstream {name}\n\n```text\n{one.format_help().rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


class Comments(griffe.Extension):
    """The comment behind a field, or in the lines above it, is its docstring, as in the reference of the config."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is None and (text := comment_of(attr)):
            attr.docstring = griffe.Docstring(text, lineno=attr.lineno, parent=attr)


def comment_of(attr: griffe.Attribute) -> str:
    if attr.lineno is None or not isinstance(attr.filepath, Path):
        return ""
    lines = attr.filepath.read_text().splitlines()
    line = lines[(attr.endlineno or attr.lineno) - 1]
    if behind := re.search(r"  # (.*)$", line):
        return behind[1]
    above: list[str] = []
    for text in reversed(lines[: attr.lineno - 1]):
        if not text.startswith("    # "):
            break
        above.insert(0, text.strip("# "))
    return " ".join(above)
