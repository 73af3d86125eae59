"""Agents of a known order meet: each in its place, all at the first one's store, and nothing listens elsewhere."""

import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters

from learner.rendezvous import ALONE, BACKEND, KnownOrder, create_handler, listen
from tests.integration.jobs.test_pickles import Mark, listeners, overwrite
from tests.rigs.processes import ROOT
from tests.rigs.waiting import LIMIT_S, until

C10D, OURS = ("torch.distributed.run", ["--standalone"], True), ("learner.torchrun", [], False)
HOST = "127.0.0.9"  # as the machine's address beside others: a store of torch's own making would listen on all


def agent(rank: int, count: int, endpoint: str, run_id: str = "run-1") -> KnownOrder:
    conf = {"rank": str(rank), "timeout": str(int(LIMIT_S))}
    return create_handler(RendezvousParameters(BACKEND, endpoint, run_id, count, count, **conf))


def met(agents: list[KnownOrder]) -> list[RendezvousInfo]:
    with ThreadPoolExecutor(len(agents)) as pool:
        return list(pool.map(KnownOrder.next_rendezvous, agents))


def listening() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("inet")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


def test_agents_share_the_store_of_the_first_one_on_its_address_alone() -> None:
    before = listening()
    meeting = listen(HOST, LIMIT_S)
    agents = [agent(rank, 3, f"{HOST}:{meeting.port}") for rank in range(3)]
    first, *others = found = met(agents)
    assert [info.rank for info in found] == [0, 1, 2] and {info.world_size for info in found} == {3}
    first.store.set("word", "known to all")
    assert [info.store.get("word") for info in others] == [b"known to all"] * 2
    places = {(info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) for info in found}
    assert listening() - before == {(HOST, meeting.port), *places} and len(places) == 1
    assert agents[0].get_backend() == BACKEND and agents[0].use_agent_store


def test_rounds_of_one_meeting_have_stores_of_their_own() -> None:
    meeting = listen(HOST, LIMIT_S)
    found: list[list[RendezvousInfo]] = []
    for run_id in ("run-1", "run-2"):
        first, second = infos = met([agent(rank, 2, f"{HOST}:{meeting.port}", run_id) for rank in range(2)])
        assert not second.store.check(["word"])
        first.store.set("word", run_id)
        found.append(infos)
    assert [second.store.get("word") for _, second in found] == [b"run-1", b"run-2"]


def test_an_agent_alone_listens_on_loopback() -> None:
    before = listening()
    (info,) = met([agent(0, 1, ALONE)])
    assert (info.rank, info.world_size, info.bootstrap_store_info.master_addr) == (0, 1, "127.0.0.1")
    assert listening() - before == {("127.0.0.1", info.bootstrap_store_info.master_port)}


@pytest.mark.parametrize(("module", "words", "unpickles"), [C10D, OURS], ids=["c10d", "ours"])
def test_torchruns_c10d_unpickles_what_anybody_may_set_and_ours_does_not(
    tmp_path: Path, module: str, words: list[str], unpickles: bool
) -> None:
    mark, end = tmp_path / "unpickled", tmp_path / "end"
    ranks = tmp_path / "rank.py"
    ranks.write_text(f"import os, time\nwhile not os.path.exists({str(end)!r}): time.sleep(0.05)\n")
    command = [sys.executable, "-m", module, *words, "--nproc-per-node", "2", str(ranks)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as torchrun:
        until(lambda: len(psutil.Process(torchrun.pid).children()) == 2, "the ranks")
        ports = listeners(torchrun.pid)
        assert sum(overwrite(("127.0.0.1", port), pickle.dumps(Mark(mark))) for port in ports) > 1
        if unpickles:
            until(mark.exists, "the next look at the value")
        end.touch()
        if not unpickles:
            assert torchrun.wait(LIMIT_S) == 0
            assert {ip for ip, _ in ports.values()} == {"127.0.0.1"}
        torchrun.kill()
    assert mark.exists() == unpickles


DRAINS = """
import os, signal, sys, time
from pathlib import Path

def drain(*_):
    time.sleep(1)
    Path(f"{os.getpid()}-drained").touch()
    os._exit(0)

if sys.argv[1] == "terminal":
    signal.signal(signal.SIGHUP, drain)
Path(f"{os.getpid()}-ready").touch()
while not os.path.exists("end"):
    time.sleep(0.05)
Path(f"{os.getpid()}-done").touch()
"""


@pytest.mark.parametrize(
    ("where", "how", "result"), [("terminal", signal.SIG_DFL, "drained"), ("nohup", signal.SIG_IGN, "done")]
)
def test_a_closed_terminal_lets_the_ranks_drain_and_under_nohup_work(
    tmp_path: Path, where: str, how: signal.Handlers, result: str
) -> None:
    """It may send several signals. Only the first one is a reason to drain."""
    (tmp_path / "rank.py").write_text(DRAINS)
    command = [sys.executable, "-m", "learner.torchrun", "--nproc-per-node", "2", "rank.py", where]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    old = signal.signal(signal.SIGHUP, how)  # inherited, also where pytest runs under nohup
    try:
        torchrun = subprocess.Popen(command, cwd=tmp_path, env=environment)
    finally:
        signal.signal(signal.SIGHUP, old)
    with torchrun:
        until(lambda: len([*tmp_path.glob("*-ready")]) == 2, "the ranks")
        for _ in range(2):
            torchrun.send_signal(signal.SIGHUP)
            time.sleep(0.5)
        if where == "nohup":
            (tmp_path / "end").touch()
        torchrun.wait(LIMIT_S)
    assert len([*tmp_path.glob(f"*-{result}")]) == 2
