"""No module of ours branches on the wording of a reason or of an error: kinds, codes and classes say what happened."""

import ast
from collections.abc import Iterator

import pytest

from tests.rigs.processes import ROOT

PACKAGES = ("common", "broker", "rollout_fleet", "learner", "launch")
REASONS = {"reason", "reasons", "why", "on", "waiting_on", "waits_for", "failure", "stuck", "error"}
METHODS = {"startswith", "endswith", "removeprefix", "removesuffix", "find", "index", "count"}
EXPRESSIONS = {"search", "match", "fullmatch", "findall", "finditer", "sub", "split"}
KNOWN = {  # those that are left: four take a key or a word off a text that is shown
    "str(error).removeprefix('expected ')",
    "str(error).removeprefix('model.path: ')",
    "str(error).removeprefix(f'{KEY}: ')",
    "str(error).removeprefix(f'{key}: ')",
    "str(error).startswith(PASSING)",  # Redis has no other code than how a message begins
    "text in e.reason",  # a person searches for a text
}


def is_wording(node: ast.expr) -> bool:
    """Whether an expression is a reason, or the text of an error or of a reason."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in REASONS or (name == "expected" and isinstance(node, ast.Attribute))
        case ast.Call(func=ast.Name(id="str" | "repr"), args=[ast.Name() | ast.Attribute()]):
            return is_wording(node.args[0]) or ast.unparse(node.args[0]) in ("e", "exc", "exception")
        case ast.Call(func=ast.Attribute(attr="lower" | "upper" | "strip" | "casefold", value=value)):
            return is_wording(value)
        case ast.BoolOp(values=values):
            return any(map(is_wording, values))
    return False


def found(tree: ast.AST) -> Iterator[str]:
    """The expressions that look at wording."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(ops=ops, comparators=right):
                pairs = zip(ops, right, strict=True)
                if any(isinstance(op, ast.In | ast.NotIn) and is_wording(one) for op, one in pairs):
                    yield ast.unparse(node)
            case ast.Call(func=ast.Attribute(attr=name, value=value), args=arguments):
                if (name in METHODS and is_wording(value)) or (name in EXPRESSIONS and any(map(is_wording, arguments))):
                    yield ast.unparse(node)


def test_nothing_in_the_product_branches_on_the_wording_of_a_reason() -> None:
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(modules) > 100
    wording = {one: path.relative_to(ROOT) for path in modules for one in found(ast.parse(path.read_text()))}
    assert {one: str(path) for one, path in wording.items() if one not in KNOWN} == {}
    assert KNOWN - wording.keys() == set(), "those that are gone leave the list"


@pytest.mark.parametrize(
    "line",
    [
        "'given up' in str(error)", "'given up' not in str(self.error)", "'x' in stall.reason", "'x' in reason.lower()",
        "reason.startswith('weights')", "str(error).endswith('x')", "report.waiting_on.startswith('x')",
        "re.search('x', str(e))", "PATTERN.fullmatch(failure)", "'x' in (reason or '')",
    ],
)  # fmt: skip
def test_each_way_is_seen(line: str) -> None:
    assert list(found(ast.parse(line)))


@pytest.mark.parametrize(
    "line", ["reason in KINDS", "code in str(number)", "error.code == 'x'", "path.startswith('x')"]
)
def test_what_looks_at_no_wording_is_left_alone(line: str) -> None:
    assert not list(found(ast.parse(line)))
