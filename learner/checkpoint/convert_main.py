"""`python -m learner.checkpoint.convert_main --model FOLDER --out DIR [--no-verify]`: one process, on the CPU.

`slipstream convert` has checked both folders before.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from common.config.converted import WEIGHTS
from common.config.schema import LearnerConfig, ParallelConfig
from common.errors import SlipstreamError
from common.process.lifecycle import die_with_parent, leave
from common.process.logs import setup_logging
from common.process.progress import growing
from learner.rank_process import guard, quiet_libraries


def run(arguments: Sequence[str]) -> int:
    """Write the folder, complete or not at all; raises as learner.megatron.conversion.convert.convert does."""
    parser = argparse.ArgumentParser(prog="python -m learner.checkpoint.convert_main")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    parser.add_argument("--no-verify", action="store_true", help="without the forward check")
    words = parser.parse_args(arguments)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent
    setup_logging("convert", "0", None, "warning")
    quiet_libraries()
    import learner.megatron.backend  # noqa: F401  (takes seconds, and prepares for megatron)
    from learner.megatron import parallel
    from learner.megatron.conversion.convert import convert
    from learner.megatron.conversion.hf_folder import staging_of, stored_bytes

    parallel.initialize(ParallelConfig(), seed=0, timeout_s=LearnerConfig().timeout_s)
    try:
        with growing(staging_of(words.out) / WEIGHTS, stored_bytes(words.model), "convert"):
            convert(words.model, words.out, checked=not words.no_verify)
    except OSError as error:
        raise SlipstreamError(f"{words.out} could not be written: {error}") from error
    parallel.shutdown()
    return 0


if __name__ == "__main__":
    leave(guard(run, sys.argv[1:]))
