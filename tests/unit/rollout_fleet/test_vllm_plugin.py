"""The plugin in processes that vLLM forks, which inherit that their parent has loaded it."""

import ast
import subprocess
import sys

import pytest

FORKED = """
import ctypes, multiprocessing
from vllm.plugins import load_general_plugins
from vllm.v1.engine.core import EngineCore

def found():
    signal = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(signal))  # PR_GET_PDEATHSIG
    return hasattr(EngineCore, "slipstream_flip"), signal.value, id(EngineCore.add_request)

def child(told, worker):
    load_general_plugins()
    told.send([found(), forked("VllmWorker-0", False)] if worker else [found()])

def forked(name, worker):
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=child, args=(there, worker), name=name)
    process.start()
    answer = here.recv()
    process.join()
    return answer

load_general_plugins()
print([found()[:2], forked("EngineCore_DP0", True), forked("Other", False)[0][:2]])
"""


@pytest.mark.slow
def test_a_forked_engine_and_its_forked_worker_are_patched_once_and_die_with_their_parents() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, check=True)
    here, ((*engine, add), ((*worker, same),)), other = ast.literal_eval(done.stdout.splitlines()[-1])
    assert here == other == (False, 0), "other programs and their children are left alone"
    assert engine == worker == [True, 9]
    assert add == same, "the patches are inherited, not applied again"
