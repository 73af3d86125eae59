"""Checks that docstrings, comments, messages and pages are plain English.

`python -m tests.check_words PATH ...` prints every finding in these files or folders, and fails if there is one.
Without a path it looks at the whole checkout.
A sentence has at most 25 words; a line of a page has at most 100 columns; BANNED lists phrases and what to say instead.
Code blocks, tables, headings, links and lists of names are not sentences.
"""

import argparse
import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("bench", "broker", "common", "configs", "docs", "examples", "launch", "learner", "rollout_fleet", "tests")
SUFFIXES = (".md", ".py", ".sh", ".yaml")
MAX_WORDS, MAX_COLUMNS = 25, 100
LOGGING = {"debug", "info", "warning", "error", "exception", "critical"}
NO_COMMENT = ("#!", "# noqa", "# type:", "# pyright:", "# ruff:", "# pragma")

BANNED = {
    r"\bshall\b": "say 'must' or 'will'",
    r"\bwho(so)?ever\b": "name the role or the process",
    r"\b(every|no|some)body\b": "name the role or the process",
    r"\bword (from|to|of)\b|\bwithout a word\b": "name the message",
    r"\b(hold|holds|holding|held)\b(?!(-| )out\b)(?! (a|the|its|that|this) lock)": "say 'has', 'keeps' or 'delays'",
    r"\b(bears?|bearing|bore|borne)\b": "say 'allows' or 'has'",
    r"\bmend(s|ed|ing)?\b": "say 'fix' or 'repair'",
    r"\b(lest|amongst|whilst|thereof|therein|hence|heeds?|upon)\b": "use a common word",
    r"\bin the mean\b": "say 'on average'",
    r"\bthe whole of (it|them)\b": "say what it is",
    r"\bgoes on (?!page\b)": "say 'continues'",
    r"\bfor dead\b": "say 'is given up'",
    r"\bhas an end\b": "say when it ends",
    r"\bthat alone\b|\bof which\b": "start a new sentence",
    r"^of\b": "start with the subject",
    r"^what\b(?!.*\?$)": "start with the subject, not with 'what'",
}
PATTERNS = [(re.compile(pattern, re.IGNORECASE), advice) for pattern, advice in BANNED.items()]
ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|al|eq|Fig|No)\.(?=\s)")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]*_]*\s+(?=[\"'(\[*_]*[A-Z0-9`<])")
LIST_ITEM = re.compile(r"\s*([-*+]|\d+[.)])\s+")
SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes|Notes?|Examples?):$")


class Passage(NamedTuple):
    """One paragraph, list item, comment or message, and the line on which it begins."""

    line: int
    text: str


class Finding(NamedTuple):
    path: str
    line: int
    problem: str


def sentences(text: str) -> list[str]:
    """The sentences of a passage; a colon or a semicolon does not end one, inline code counts as one word."""
    text = re.sub(r"`+[^`]+`+", "`code`", text)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"https?://\S+", "link", text)
    text = ABBREVIATIONS.sub(r"\1", " ".join(text.split()))
    return [sentence.strip() for sentence in SENTENCE_END.split(text) if sentence and sentence.strip()]


def words(sentence: str) -> int:
    """Number of words; 0 for a list of names or an equation, which has no sentence to shorten."""
    found = [token for token in sentence.split() if re.search(r"\w", token)]
    items = [len(item.split()) for item in sentence.split(",")]
    is_list = len(items) >= 6 and sorted(items)[len(items) // 2] <= 2
    is_equation = 4 * sum(not re.search(r"\w", token) for token in sentence.split()) > len(found)
    return 0 if is_list or is_equation else len(found)


def problems(text: str) -> Iterator[str]:
    for sentence in sentences(text):
        start = sentence if len(sentence) <= 60 else f"{sentence[:57]}..."
        if (count := words(sentence)) > MAX_WORDS:
            yield f"{count} words in one sentence, at most {MAX_WORDS}: {start!r}"
        plain = sentence.strip("*_\"'( ")
        for pattern, advice in PATTERNS:
            if match := pattern.search(plain):
                yield f"'{match[0]}': {advice}: {start!r}"


def paragraphs(lines: list[tuple[int, str]]) -> Iterator[Passage]:
    """Joins neighbouring lines; an empty line and a list item each begin a new passage."""
    begun, parts = 0, list[str]()
    for number, line in [*lines, (0, "")]:
        item = LIST_ITEM.match(line)
        if parts and (item or not line.strip()):
            yield Passage(begun, " ".join(parts))
            parts = []
        if line.strip():
            begun = begun if parts else number
            parts.append(line[item.end() :] if item else line.strip())


def page_lines(text: str) -> Iterator[tuple[int, str]]:
    """A page's lines with its prose; everything else becomes an empty line."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fence = line.lstrip().startswith("```")
        other = line.startswith(("    ", "#", "|", "<!--", "![")) and not LIST_ITEM.match(line)
        yield number, "" if fence or fenced or other else line
        fenced ^= fence


def too_wide(line: str) -> bool:
    """Whether a line could be wrapped and was not."""
    return len(line) > MAX_COLUMNS and max(map(len, line.split()), default=60) < 60


def docstring_lines(text: str, first: int) -> Iterator[tuple[int, str]]:
    """A docstring's lines without code and diagrams; every argument of a Google section is a passage of its own."""
    section = False
    for number, line in enumerate(inspect.cleandoc(text).splitlines(), first):
        if SECTION.match(line):
            section, prose = True, ""
        elif not line.startswith("  "):
            section, prose = section and not line.strip(), line
        elif section and (entry := re.match(r" {2,4}[\w*, ]+(\([^)]*\))?: (.*)", line)):
            prose = f"- {entry[2]}"
        else:
            prose = line.strip() if section or LIST_ITEM.match(line) else ""
        yield number, prose


def spoken(node: ast.expr) -> str | None:
    """The text of a string or f-string, a value in it being one word; None for any other expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
    return None


def messages(tree: ast.Module) -> Iterator[Passage]:
    """Strings that are raised, printed, logged, or that describe a metric."""
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if isinstance(node, ast.Raise) or name in LOGGING | {"print", "metric", "refuse"}:
            texts = [(arg.lineno, spoken(arg)) for arg in [*call.args, *(k.value for k in call.keywords)]]
            yield from (Passage(line, text) for line, text in texts if text)


def docstrings(tree: ast.Module) -> Iterator[Passage]:
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and (text := ast.get_docstring(node, clean=False)):
            yield from paragraphs(list(docstring_lines(text, node.body[0].lineno)))


def comments(lines: list[tuple[int, int, str]]) -> Iterator[Passage]:
    """Comments as (line, column, text): neighbouring ones in the same column are one passage."""
    block: list[tuple[int, str]] = []
    last = (0, 0)
    for number, column, text in lines:
        if text.startswith(NO_COMMENT):
            continue
        if (number - 1, column) != last:
            yield from paragraphs(block)
            block = []
        content = text.lstrip("#").removeprefix(" ")
        block.append((number, "" if content.startswith("  ") else content))
        last = (number, column)
    yield from paragraphs(block)


def passages(path: Path, text: str) -> Iterator[Passage]:
    if path.suffix == ".md":
        yield from paragraphs(list(page_lines(text)))
    elif path.suffix == ".py":
        tree = ast.parse(text)
        yield from docstrings(tree)
        yield from messages(tree)
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        yield from comments([(*token.start, token.string) for token in tokens if token.type == tokenize.COMMENT])
    else:
        found = ((n, re.search(r"(?:^|\s)(#.*)", line)) for n, line in enumerate(text.splitlines(), 1))
        yield from comments([(n, match.start(1), match[1]) for n, match in found if match])


def check_file(path: Path) -> list[Finding]:
    """The findings of one file, in the order of its lines."""
    text = path.read_text()
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    found = [Finding(name, p.line, problem) for p in passages(path, text) for problem in problems(p.text)]
    if path.suffix == ".md":
        wide = [number for number, line in page_lines(text) if too_wide(line)]
        found += [Finding(name, number, f"a line of more than {MAX_COLUMNS} columns") for number in wide]
    return sorted(found, key=lambda finding: finding.line)


def files_of(path: Path) -> list[Path]:
    """The file itself, or everything in a folder that is checked."""
    inside = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    return [path] if path.is_file() else [p for p in inside if "/." not in f"/{p.relative_to(path)}"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="check_words", description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders; by default everything")
    given = parser.parse_args(arguments).paths
    paths = given or [*ROOT.glob("*.md"), *(ROOT / folder for folder in FOLDERS)]
    found = [finding for path in paths for file in files_of(path.resolve()) for finding in check_file(file)]
    print(*(f"{f.path}:{f.line}: {f.problem}" for f in found), f"{len(found)} findings", sep="\n")
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main())
