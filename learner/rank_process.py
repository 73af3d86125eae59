"""A learner rank as a process: arguments, signals, threads, logs and exit codes."""

import logging
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from types import FrameType

from common.errors import EXIT_FAILED, SlipstreamError
from common.process.lifecycle import die_with_parent, stop_signals
from common.process.logs import setup_logging
from common.process.run_dir import RunDir

logger = logging.getLogger(__name__)


class RankProcess:
    """This process as one rank of torchrun's world (or alone); the lead rank talks to the rest of the system."""

    def __init__(self, role: str, run_dir: RunDir, threads: int, log_level: str) -> None:
        """Tie the process to its parent, set up logs, threads and, alone in its world, the drain on signals."""
        rank = int(os.environ.get("RANK", "0"))
        self.is_lead = rank == 0
        self._reason: str | None = None
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent()
        setup_logging(role, str(rank), run_dir.logs, log_level)
        quiet_libraries()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            # A rank that waits for the others to join runs no Python, so a handler would keep torchrun from ending it.
            for number in stop_signals():
                signal.signal(number, signal.SIG_DFL)
        else:
            self.drain_on_signals()

        import torch

        torch.set_num_threads(threads)

    def drain_on_signals(self) -> None:
        """From here on `stop_signals` ask for a drain; called when every rank has joined the world.

        Unlike elsewhere, a second signal does not kill: torchrun passes a Ctrl-C on that the terminal has sent to every
        process already.
        """
        for number in stop_signals():
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._reason = self._reason or signal.Signals(number).name

    def stop_requested(self) -> str | None:
        """Name of the signal that asked this process to stop; None while there was none."""
        return self._reason


def quiet_libraries() -> None:
    """Leave out of the log what libraries say about themselves."""
    logging.getLogger("megatron").setLevel(logging.WARNING)  # it reports its own defaults at INFO
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns about what is not installed on purpose
    for module in (r"megatron\.", r"torch\.", r"transformers\."):
        warnings.filterwarnings("ignore", module=module)


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
