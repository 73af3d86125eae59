"""Worker extension of the tests: what our own one does, and damage on request."""

import os
from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.engine.core import EngineCore

from common.weights.receive import receiver
from rollout_fleet.vllm_patches import worker_process
from rollout_fleet.weights.worker_extension import WorkerExtension


def told(engine: Any, names: list[str]) -> tuple[str, int, list[str | None]]:
    """Name of the scheduler, batches in flight between two steps, and what this process has under these variables."""
    return type(engine.scheduler).__name__, len(engine.batch_queue or ()), [os.environ.get(name) for name in names]


EngineCore.slipstream_told = told  # type: ignore[attr-defined]


class DamagingExtension(WorkerExtension):
    def damage_next_load(self, part: str) -> None:
        """After the next load one element of the first parameter named like `part` gets another value."""
        renew = worker_process.renew

        def damaged(model: Any, dtype: Any) -> None:
            worker_process.renew = renew
            renew(model, dtype)
            for held in [p.data for name, p in model.named_parameters() if part in name][:1]:  # a stage may have none
                if held.itemsize == 1:  # 8 bits, as [in, out]
                    held.t().view(torch.uint8).view(-1)[-1] ^= 1
                else:
                    held.view(-1)[-1] += 1e-3

        worker_process.renew = damaged

    def parameter_bytes(self) -> int:
        """Size of the live parameters; a tied head counts once."""
        return sum(parameter.nbytes for parameter in self.model_runner.get_model().parameters())

    def spoil_decoding(self) -> None:
        """At the next flip latent attention decodes with other values than prefill computes with."""
        renew = worker_process.renew

        def spoiled(model: Any, dtype: Any) -> None:
            worker_process.renew = renew
            renew(model, dtype)
            for layer in (m for m in model.modules() if hasattr(m, "W_UV")):
                layer.W_UV = torch.nn.Parameter(layer.W_UV.flip(0), requires_grad=False)

        worker_process.renew = spoiled

    def allocate_stage_input(self) -> None:
        """Do what vLLM's dummy run does. vLLM 0.32 skips that run on a CPU with `eager`, and fails at a request."""
        runner: Any = self.model_runner
        make = runner.get_model().make_empty_intermediate_tensors
        runner.intermediate_tensors = make(runner.max_num_tokens, runner.model_config.dtype, runner.device)

    def damage_next_bucket(self, number: int) -> None:
        """One bit of bucket `number` of the next publish arrives wrong, before anything looked at it."""
        arriving = receiver.in_turn

        def damaged(*transfer: Any) -> Iterator[Any]:
            receiver.in_turn = arriving
            for i, bucket in enumerate(arriving(*transfer)):
                if i == number:
                    bucket[len(bucket) // 2] ^= 1
                yield bucket

        receiver.in_turn = damaged
