"""torchrun with the exit codes of a role: `python -m learner.torchrun [OPTIONS] -m learner.main --config FILE`.

torchrun itself ends with code 1 whatever its ranks ended with, also after a signal that they obeyed. Here a drain
is 0, and an error has the code of the rank that failed first (2 for bad usage). The ranks meet without pickles.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed.elastic.multiprocessing.api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.run import get_args_parser
from torch.distributed.run import main as run_torchrun

from common.config.loading import load_either
from common.errors import EXIT_DONE, EXIT_FAILED
from common.process.lifecycle import join_supervisor, leave, stop_signals
from common.process.run_dir import RunDir
from learner.loop.run_files import read_record
from learner.rendezvous import ALONE, BACKEND, create_handler

Handler = Callable[[int, FrameType | None], None]
GRACE = "--shutdown-timeout"  # seconds from SIGTERM to SIGKILL for ranks that are still busy


def main(words: Sequence[str]) -> int:
    """Start the ranks and wait for them; returns the exit code that a person expects."""
    join_supervisor()
    library: Any = torch.distributed.elastic.multiprocessing.api
    library._terminate_process_handler = hanging_up_once(library._terminate_process_handler)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks have logged what is wrong
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # its defaults in a pod of Kubeflow: PET_NNODES=2 would wait for another machine
    rendezvous_handler_registry.register(BACKEND, create_handler)
    try:
        run_torchrun(["--rdzv-backend", BACKEND, "--rdzv-endpoint", ALONE, *with_grace(words)])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else EXIT_FAILED
    except SignalException:
        config = load_either(Path(words[list(words).index("--config") + 1]))
        record = read_record(RunDir(config.run.dir))
        ended_well = record is not None and record.state in ("drained", "done")
        return EXIT_DONE if ended_well else EXIT_FAILED
    return EXIT_DONE


def hanging_up_once(handler: Handler) -> Handler:
    """torch's handler, which kills ranks that drain at each later signal, and takes SIGHUP also under nohup."""
    ignored = signal.SIGHUP not in stop_signals()
    heard = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        if number != signal.SIGHUP or not (ignored or heard):
            heard = True
            handler(number, frame)

    return handle


def with_grace(words: Sequence[str]) -> Sequence[str]:
    """`words` for the torch that is there: 2.11 has no GRACE and kills after 30 s, unless its agent is changed.

    As in later ones, ranks beside a failed one still have 30 s.
    """
    if GRACE not in words or any(GRACE in action.option_strings for action in get_args_parser()._actions):
        return words
    at = words.index(GRACE)
    seconds = int(words[at + 1])
    kind: Any = LocalElasticAgent
    shutdown = kind._shutdown

    def patient(agent: LocalElasticAgent, death_sig: signal.Signals = signal.SIGTERM) -> None:
        if agent._pcontext is not None:
            agent._pcontext.close(death_sig, seconds)
        shutdown(agent, death_sig)  # it closes again, which finds no process

    kind._shutdown = patient
    return [*words[:at], *words[at + 2 :]]


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
