"""What every learner rank does as a process: arguments, signals, threads, logs and exit codes."""

import argparse
import logging
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from common.errors import EXIT_FAILED, SlipstreamError
from common.lifecycle import DrainFlag, die_with_parent
from common.logs import setup_logging
from common.run_dir import RunDir

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arguments:
    """The words of a rank's command line."""

    config: Path
    broker: str | None
    overrides: list[str]


def parse_arguments(program: str, words: Sequence[str]) -> Arguments:
    """--config FILE [--broker ADDRESS] [key=value ...]; exits with code 2 on anything else."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--broker", metavar="ADDRESS", help="instead of the one in the config or in RUN/broker.json")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    found = parser.parse_args(words)
    return Arguments(found.config, found.broker, found.overrides)


class RankProcess:
    """This process as one rank of torchrun's world (or alone)."""

    def __init__(self, rank: int, flag: DrainFlag) -> None:
        self.rank = rank
        self._flag = flag

    @property
    def is_lead(self) -> bool:
        """Whether this rank talks to the rest of the system."""
        return self.rank == 0

    @classmethod
    def start(cls, role: str, run_dir: RunDir, threads: int, log_level: str) -> "RankProcess":
        """Tie the process to its parent, set up logs, threads and the drain on SIGTERM and SIGINT.

        torchrun passes a Ctrl-C on although the terminal has sent it to every process already, so unlike elsewhere a
        second signal does not kill: the drain ends by itself, or torchrun ends it.
        """
        rank = int(os.environ.get("RANK", "0"))
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent()
        setup_logging(role, str(rank), run_dir.logs, log_level)
        _quieten_libraries()
        flag = DrainFlag()

        def on_signal(number: int, frame: FrameType | None) -> None:
            flag.set(signal.Signals(number).name)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)

        import torch

        torch.set_num_threads(threads)
        return cls(rank, flag)

    def stop_requested(self) -> str | None:
        """Name of the signal that asked this process to stop; None while there was none."""
        return self._flag.reason or None


def guard(run: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """Run a rank; our own errors become their exit code and one log line, others a traceback and code 1."""
    try:
        return run(words)
    except SlipstreamError as error:
        logger.error("%s", error)
        return error.exit_code
    except Exception:
        logger.exception("the rank failed")
        return EXIT_FAILED


def _quieten_libraries() -> None:
    """Megatron reports its own defaults at INFO, and libraries warn about what is not installed on purpose."""
    logging.getLogger("megatron").setLevel(logging.WARNING)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    for module in (r"megatron\.", r"torch\.", r"transformers\."):
        warnings.filterwarnings("ignore", module=module)
