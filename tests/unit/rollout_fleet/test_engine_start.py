"""Processes of an engine are forks of its node from before the node had threads, in the node's environment."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.process.lifecycle import alive
from tests.rigs.processes import ROOT
from tests.rigs.waiting import until

SCRIPT = """
import json, os, sys, time
from pathlib import Path

WORKER = "vllm.v1.worker.cpu_worker"

def load_general_plugins():
    from vllm import plugins
    plugins.load_general_plugins()

def worker(told):
    load_general_plugins()
    told.send([WORKER in sys.modules, os.getpid(), os.getppid()])
    time.sleep(3600)

def engine(told):
    known = WORKER in sys.modules
    from vllm.v1.executor import multiproc_executor
    context = multiproc_executor.get_mp_context()
    here, there = context.Pipe()
    context.Process(target=worker, args=(there,), name="VllmWorker-0").start()
    load_general_plugins()
    told.send([known, os.getpid(), os.getppid(), *here.recv(), *map(os.environ.get, ("LATE", "GONE"))])
    time.sleep(3600)

if __name__ == "__main__":
    from rollout_fleet.vllm_patches import engine_start
    os.environ["GONE"] = "1"
    engine_start.import_ahead(Path(sys.argv[1]), has_workers=True)
    from vllm.v1.engine import utils
    os.environ["LATE"] = "2"
    del os.environ["GONE"]
    context = utils.get_mp_context()
    here, there = context.Pipe()
    context.Process(target=engine, args=(there,), name="EngineCore").start()
    print(json.dumps(here.recv()), flush=True)
    time.sleep(3600)
"""


@pytest.mark.slow
def test_an_engine_finds_vllm_imported_and_the_variables_of_its_start_and_ends_with_its_node(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM", "NoSuchModel"]}))
    script = tmp_path / "node.py"
    script.write_text(SCRIPT)
    words = [sys.executable, "-W", "ignore", str(script), str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as node:
        assert node.stdout is not None
        known, engine, server, known_to_worker, worker, its_server, late, gone = json.loads(node.stdout.readline())
        assert known and known_to_worker and len({node.pid, server, engine, its_server, worker}) == 5
        assert (late, gone) == ("2", None)
        os.kill(engine, signal.SIGKILL)
        until(lambda: not alive(its_server) and not alive(worker), "the end of what the engine started")
        assert alive(server)
        node.kill()
        until(lambda: not alive(server))


THREAD = "import threading, time; threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"


@pytest.mark.parametrize("text, before", [(None, ""), ("{", ""), ("[]", ""), ("{}", THREAD)])
def test_nothing_is_imported_for_a_folder_without_a_model_or_beside_threads(
    tmp_path: Path, text: str | None, before: str
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    script = f"{before}import sys; from pathlib import Path\n"
    script += "from rollout_fleet.vllm_patches.engine_start import import_ahead\n"
    script += f"import_ahead(Path({str(tmp_path)!r})); sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0
