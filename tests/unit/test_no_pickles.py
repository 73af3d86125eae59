"""No module of ours makes or reads a pickle, nor asks a library for a way that does so between processes."""

import ast
from collections.abc import Iterator

import pytest

from tests.rigs.processes import ROOT

PACKAGES = ("common", "broker", "rollout_fleet", "learner", "launch")  # bench/ measures the pickles of others
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "multiprocessing.managers",
}
CALLS = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),  # torch's
    *("send_object_list", "recv_object_list", "all_to_all_object_list"),
    *("broadcast_object", "send_object", "recv_object", "broadcast_tensor_dict", "send_tensor_dict"),  # vLLM's
    *("recv_tensor_dict", "recv_pyobj", "send_pyobj"),  # pyzmq's
}
WORDS = {  # in a string: options that choose a way with pickles
    "c10d": "torchrun's rendezvous unpickles a value of its store",
    "--standalone": "it chooses c10d",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "vLLM's messages may have pickles then",
}
OPTIONS = {"allow_pickle": True, "weights_only": False}


def found(tree: ast.AST) -> Iterator[str]:
    """The pickles of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
            yield from sorted(names & MODULES)
            yield from (alias.name for alias in node.names if alias.name in CALLS)
        elif isinstance(node, ast.Attribute) and node.attr in CALLS:
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in WORDS:
            yield f"{node.value}: {WORDS[node.value]}"
        elif isinstance(node, ast.keyword) and (node.arg, getattr(node.value, "value", None)) in OPTIONS.items():
            yield f"{node.arg}={ast.unparse(node.value)}"


def test_no_module_of_ours_pickles() -> None:
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(modules) > 200
    pickles = {str(path.relative_to(ROOT)): [*found(ast.parse(path.read_text()))] for path in modules}
    assert {name: each for name, each in pickles.items() if each} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from pickle import loads", "from multiprocessing import managers", "import dill",
        "dist.all_gather_object(a, b)", "group.broadcast_object(x, src=0)",
        "from torch.distributed import gather_object",
        "options = {'rdzv-backend': 'c10d'}", "words = ['--standalone']", "np.load(f, allow_pickle=True)",
        "torch.load(f, weights_only=False)", "socket.recv_pyobj()",
    ],
)  # fmt: skip
def test_each_way_is_seen(line: str) -> None:
    assert list(found(ast.parse(line)))
