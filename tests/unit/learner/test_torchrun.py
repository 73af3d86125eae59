"""torchrun as the roles use it, with the torch that is installed and with older ones."""

import argparse
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import PContext, SignalException

from common.config.loading import load_either
from common.process.run_dir import RunDir
from learner import torchrun
from learner.loop.run_files import write_record
from tests.rigs.configs import write_job

WORDS = ["--nproc-per-node", "2", torchrun.GRACE, "300", "-m", "learner.main"]


@pytest.mark.parametrize("known", [True, False], ids=["2.13", "2.11"])
def test_busy_ranks_get_their_time_from_a_torch_without_the_option_too(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    parser = argparse.ArgumentParser()
    if known:
        parser.add_argument(torchrun.GRACE)
    monkeypatch.setattr(torchrun, "get_args_parser", lambda: parser)
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", LocalElasticAgent._shutdown)  # it is put back at the end
    left = PContext.close.__defaults__
    found = torchrun.with_grace(WORDS)
    assert found == (WORDS if known else ["--nproc-per-node", "2", "-m", "learner.main"])
    closed = list[tuple[int, ...]]()
    agent = cast(Any, object.__new__(LocalElasticAgent))
    agent._worker_watchdog = agent._health_check_server = None
    agent._pcontext = SimpleNamespace(close=lambda *how: closed.append(how))
    agent._shutdown(signal.SIGINT)
    assert (closed[0] == (signal.SIGINT, 300)) is not known
    assert PContext.close.__defaults__ == left, "ranks beside a failed one are not waited for as long"


def test_words_without_the_option_stay_as_they_are() -> None:
    assert torchrun.with_grace(WORDS[:2]) == WORDS[:2]


def test_a_pod_s_defaults_of_torchrun_do_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_MASTER_ADDR", "elsewhere")
    monkeypatch.setattr(torchrun, "join_supervisor", lambda: None)
    options = ["--nproc-per-node", "1", "-m", "learner.main"]
    parsed = lambda _: found.append(torchrun.get_args_parser().parse_args(options).nnodes)  # noqa: E731
    monkeypatch.setattr(torchrun, "run_torchrun", parsed)
    assert torchrun.main(options) == 0
    assert found == ["1:1"] and not [name for name in os.environ if name.startswith("PET_")]


@pytest.mark.parametrize(("state", "code"), [("drained", 0), ("done", 0), ("running", 1), ("", 1)])
def test_ranks_that_a_signal_ended_have_done_their_work_or_have_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, code: int
) -> None:
    config = write_job(tmp_path)
    run = RunDir.of(load_either(config))
    if state:
        write_record(run, 0, state, 0)

    def told(words: object) -> None:
        raise SignalException("told to end", signal.SIGTERM)

    monkeypatch.setattr(torchrun, "join_supervisor", lambda: None)
    monkeypatch.setattr(torchrun, "run_torchrun", told)
    assert torchrun.main(["--config", str(config)]) == code
