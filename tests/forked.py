"""Test processes forked from one that has imported torch already, which costs seconds of CPU each time."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRELOAD = ["common.weights.receive.receiver", "common.weights.transports.groups", "common.weights.transports.relay"]


def context() -> ForkServerContext:
    """The fork server's context; its process starts with the first child."""
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    os.environ["OMP_NUM_THREADS"] = "1"
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([*PRELOAD, "common.weights.receive.weight_client"])
    return found


def start(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A child that runs `target`, a function of an importable module, and dies with this process."""
    process = context().Process(target=target, args=arguments, daemon=True)
    process.start()
    return process
