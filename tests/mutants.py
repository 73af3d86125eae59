"""Measures how strong the fast tests are: python -m tests.mutants --count 200 --seed 26.

A mutant is one random small change in a function of PACKAGES. It may be another comparison, `and` for `or`, plus for
minus, a dropped call, or a number off by one. The fast tests that reach the changed lines run against it, in a copy of
the tree. A mutant is killed when a test fails or does not end. The map from lines to tests is made in one process, once
per state of the code. Lines that only a child process runs count as reached by no test.

The result has every mutant with its fate. A survivor that changes no behaviour gets a reason by hand, as "equivalent".
Later calls keep the reasons. The tools mutmut and cosmic-ray neither draw a sample nor choose tests by changed
line. With cosmic-ray every mutant would run all fast tests.
"""

import argparse
import ast
import ctypes
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness import machine
from tests.reached import reached, run

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    *("common/staleness", "common/weights", "broker/delivery", "broker/journal", "broker/guard"),
    *("broker/server/flood_guard", "broker/server/request_guard", "learner/loss", "learner/batch"),
)
LIBRARIES = ("numpy", "torch", "torch.distributed", "zmq", "zmq.asyncio", "msgspec", "redis", "yaml")
PAIRS = [(ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.And, ast.Or)]
PAIRS += [(ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv)]
SWAPS: dict[type, tuple[type, ...]] = {one: (other,) for pair in PAIRS for one, other in (pair, pair[::-1])} | {
    **{ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt)},
    **{ast.Div: (ast.Mult,), ast.Mod: (ast.FloorDiv,), ast.USub: (ast.UAdd,)},
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Site(NamedTuple):
    """A place that can be changed; `change` changes it in its syntax tree."""

    function: str
    lines: range  # the statement's, or its head's
    node: ast.AST  # which is shown in the result
    change: Callable[[], None]


def sites(node: ast.AST, function: str = "", lines: range = range(0)) -> Iterator[Site]:
    """All places in the functions of a module, in the order of the text; messages and type hints have none."""
    if isinstance(node, ast.stmt):
        body = getattr(node, "body", None)
        whole = body is None or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        lines = range(node.lineno, 1 + (node.end_lineno or 0) if whole else max(node.lineno + 1, body[0].lineno))
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        inside = function + "." * bool(function) + node.name
        children = [one for one in node.body if hasattr(one, "name")]  # fields of a class are declarations
        if not isinstance(node, ast.ClassDef):
            children = [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]
        for child in children:
            yield from sites(child, inside, lines)
        return
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("logger.")):
        return
    if function and lines:
        yield from (Site(function, lines, node, change) for change in _changes(node))
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name != "annotation":
                yield from sites(child, function, lines)


def _changes(node: ast.AST) -> Iterator[Callable[[], None]]:
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                yield from (lambda i=i, new=new: ops.__setitem__(i, new()) for new in SWAPS[type(op)])
        case ast.BoolOp() | ast.BinOp() | ast.AugAssign() | ast.UnaryOp(op=ast.USub()):
            yield from (lambda new=new: setattr(node, "op", new()) for new in SWAPS.get(type(node.op), ()))
        case ast.UnaryOp(op=ast.Not()):
            yield lambda: setattr(node, "operand", ast.UnaryOp(ast.Not(), node.operand))
        case ast.Constant(value=bool()):
            yield lambda: setattr(node, "value", not node.value)
        case ast.Constant(value=int()):
            yield from (lambda by=by: setattr(node, "value", node.value + by) for by in (1, -1))
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            yield lambda: setattr(node.func, "id", CALLS[name])
        case ast.Expr(value=ast.Call() | ast.Await()) if not ast.unparse(node).startswith("logger."):
            yield lambda: setattr(node, "value", ast.Constant(None))


def mutated(source: str, number: int) -> tuple[str, dict[str, Any], range]:
    """The source with change `number`, a description of the change, and the lines that reach it."""
    tree = ast.parse(source)
    site = list(sites(tree))[number]
    before = ast.unparse(site.node)
    site.change()
    about = {"line": site.node.lineno, "function": site.function, "number": number}
    return ast.unparse(tree), about | {"before": before, "after": ast.unparse(site.node)}, site.lines


def fate(name: str, number: int, tests: dict[str, Any]) -> dict[str, Any]:
    """Try one mutant of the copy in the current folder."""
    path, kept = Path(name), Path("original")
    shutil.copy2(path, kept)
    source, about, lines = mutated(path.read_text(), number)
    reaching = [test for test, each in tests.items() if any(f"{name}:{line}" in each["lines"] for line in lines)]
    seconds = Counter[str]()
    for test in reaching:
        seconds[test.split("::")[0]] += 0.01 + tests[test]["s"]
    order = sorted(reaching, key=lambda test: (seconds[test.split("::")[0]], test.split("::")[0]))
    about = {"path": name, **about, "tests": len(order), "killed_by": ""}
    if order:
        path.write_text(source)
        chosen = {test: 30 + round(4 * tests[test]["s"]) for test in order}
        found = run(["-x", *sorted(seconds)], chosen=chosen, timeout_s=60 + sum(chosen.values()))
        shutil.copy2(kept, path)
        about["killed_by"] = next(iter(found["failed"]), "") if found else "no end"
    return about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=26)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "mutants.json")
    parser.add_argument("--work", type=Path, help="a folder to keep, with the map from lines to tests")
    parser.add_argument(
        "--survivors",
        action="store_true",
        help="take the mutants of the former result that are still there, and try only the survivors again",
    )
    options = parser.parse_args()
    folder = options.work or Path(tempfile.mkdtemp(prefix="mutants-"))
    tree = folder.resolve() / "tree"
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    shutil.rmtree(tree, ignore_errors=True)
    for name in subprocess.check_output([*git, "ls-files", "-co", "--exclude-standard"], text=True).splitlines():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what a killed test leaves behind can be ended
    for name in LIBRARIES:
        importlib.import_module(name)
    arguments = {name: getattr(options, name) for name in ("count", "seed", "survivors")}
    origin = {"commit": commit, "arguments": arguments, "machine": machine()}
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1"}
    os.chdir(tree)
    sys.path[:] = [str(tree), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
    tests = reached(PACKAGES, folder.resolve())
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    last = json.loads(options.out.read_text())["mutants"] if options.out.exists() else []
    reasons = {key_of(m): m.get("equivalent", "") for m in last}
    everything = [
        (name, number)
        for name in sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*.py"))
        if name.startswith(PACKAGES)
        for number, _ in enumerate(sites(ast.parse(Path(name).read_text())))
    ]
    random.Random(options.seed).shuffle(everything)
    again = found_again(last, everything) if options.survivors else {}
    drawn = [*again, *(place for place in everything if place not in again)]
    mutants: list[dict[str, Any]] = []
    for name, number in drawn[: options.count]:
        known = again.get((name, number), {"killed_by": ""})
        mutant = known if known["killed_by"] else fate(name, number, tests)
        if reason := reasons.get(key_of(mutant)):
            mutant["equivalent"] = reason
        mutants.append(mutant)
        print(f"{len(mutants)} {shown(mutant)}: {mutant['killed_by'] or 'SURVIVED'}", flush=True)
        about = {**origin, "possible": len(everything), **summary(mutants)}
        options.out.write_text(json.dumps(about | {"mutants": mutants}, indent=1) + "\n")


def key_of(mutant: dict[str, Any]) -> tuple[str, ...]:
    """The change itself; a mutant's line and number move with other changes."""
    return mutant["path"], mutant["function"], mutant["before"], mutant["after"]


def found_again(last: list[dict[str, Any]], places: list[tuple[str, int]]) -> dict[tuple[str, int], dict[str, Any]]:
    """Former mutants by where they are now, as they were; of those that read alike, the one at the nearest line."""
    alike = defaultdict[tuple[str, ...], list[tuple[int, int]]](list)
    for name, number in places:
        if any(mutant["path"] == name for mutant in last):
            about = {"path": name, **mutated(Path(name).read_text(), number)[1]}
            alike[key_of(about)].append((about["line"], number))
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for mutant in last:
        key = key_of(mutant)
        if alike[key]:
            nearest = min(alike[key], key=lambda place: abs(place[0] - mutant["line"]))
            alike[key].remove(nearest)
            found[mutant["path"], nearest[1]] = mutant
    return found


def shown(mutant: dict[str, Any]) -> str:
    return f"{mutant['path']}:{mutant['line']}: {mutant['before']} -> {mutant['after']}"


def summary(mutants: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts and survivors; `packages` has (killed, tried) of each without the equivalent ones."""
    real = [m for m in mutants if not m.get("equivalent")]
    packages = {p: [bool(m["killed_by"]) for m in real if m["path"].startswith(p)] for p in PACKAGES}
    return {
        "tried": len(mutants),
        "equivalent": len(mutants) - len(real),
        "killed": sum(bool(m["killed_by"]) for m in real),
        "packages": {name: (sum(killed), len(killed)) for name, killed in packages.items()},
        "survivors": [shown(m) for m in real if not m["killed_by"]],
    }


if __name__ == "__main__":
    main()
