"""Starts learners, one at a time, as forks of this process, which has imported Megatron once (seconds of CPU).

Standard input: one line per learner, its arguments as JSON. Standard output: its process id, later its exit code
(negative: the signal that ended it). Ends when standard input does, or with the parent that started it.
"""

import json
import os
import signal
import sys

import torch

from common.process.lifecycle import die_with_parent, leave


def main() -> None:
    """Serve until standard input ends."""
    die_with_parent()
    torch.set_num_threads(1)
    from learner.main import main as learn

    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(2, 1)
            leave(learn(json.loads(line)))
        print(pid, flush=True)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(code, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test's business
    main()
