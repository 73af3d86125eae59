"""The device that tests of the learner and of the weight plane run on, and how exactly it computes in float32."""

import os
from importlib.util import find_spec

import torch

from learner.megatron.cpu.compat import PLAIN

CUDA = torch.cuda.is_available()
# Tolerances are for the CPU. CUDA sums in another order, and Transformer Engine multiplies float32 as TF32.
LOOSE = (1000.0 if find_spec("transformer_engine") and not os.environ.get(PLAIN) else 10.0) if CUDA else 1.0
RANKS = int(os.environ.get("SLIPSTREAM_TEST_RANKS", "8"))  # the largest world of the layouts that are tried


def sharing(name: object) -> dict[str, str]:
    """Variables of one of several processes that use one GPU.

    NCCL takes two ranks of one host and device for a mistake, and believes in two hosts when their ids differ.
    """
    return {"NCCL_HOSTID": str(name), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def rank_environment(rank: int, ranks: int, devices: int) -> dict[str, str]:
    """Variables of one of `ranks` local ranks; without `devices` all compute on the CPU."""
    found = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank % max(1, devices))}
    return found | (sharing(rank) if 0 < devices < ranks else {})
