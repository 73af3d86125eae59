"""One rank of a trial: `python -m learner.certificate.rank FOLDER NAME`, in the world that its environment names.

It writes FOLDER/NAME/RANK.safetensors, where NAME.TENSOR stands for

    weight     the weights as they were loaded (rank 0)
    gradient   the gradients of the weights, or of the adapters, under the names of the files (rank 0)
    trained    weights, or adapters, after one step (rank 0); `adapter` the adapters before it
    again      gradients of the adapters after the step, when all of them matter (rank 0)
    logprobs   of the packs that this rank trains, all tokens; `after` the step
    figures    loss, and norm of the gradients

and FOLDER/NAME/critic/RANK.safetensors with the same of a critic, whose values are in the place of log-probabilities.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from common.process.lifecycle import die_with_parent, leave
from common.process.logs import setup_logging
from learner.backend_protocol import Microbatch, StepResult
from learner.certificate.batch import loss_of, temperature_of, value_loss_of
from learner.certificate.trial import CRITIC, Trial, job, microbatches, trial_of
from learner.rank_process import guard, quiet_libraries


@contextmanager
def gradients_in_place(backend: Any) -> Iterator[None]:
    """Within, every parameter is its gradient, gathered over data parallelism; NaN where it has none."""
    for chunk in backend.chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, shard, group=group)
    groups = [g for chunk in backend.chunks for g in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]
    gathered = [group.param_gather_dispatched for group in groups]  # an export asks for it, and a step may come next
    kept = [(p, p.data) for chunk in backend.chunks for p in chunk.module.parameters()]
    for parameter, data in kept:
        gradient = getattr(parameter, "main_grad", None)
        none = torch.full_like(data, float("nan"))
        parameter.data = none if gradient is None else gradient.to(data.dtype, copy=True)  # another dtype loses hooks
    yield
    for parameter, data in kept:
        parameter.data = data
    for group, was in zip(groups, gathered, strict=True):
        group.param_gather_dispatched = was


def gradients(backend: Any) -> dict[str, Tensor]:
    """Full gradients under Hugging Face names, exported as if they were weights.

    Parameters without a gradient are left out.
    """
    with gradients_in_place(backend):
        found = {n: t.float().clone() for n, t in backend.export()}
    return {n: g for n, g in found.items() if not n.endswith("correction_bias") and not g.isnan().any()}


def share(backend: Any, batches: list[Microbatch]) -> list[Microbatch]:
    """This data-parallel rank's packs."""
    return batches[backend.data_parallel_rank :: backend.data_parallel_size]


def numbered(backend: Any, rows: list[Tensor], prefix: str) -> dict[str, Tensor]:
    """`rows` of this rank's packs as PREFIX.NUMBER, with each pack's number among all."""
    size, rank = backend.data_parallel_size, backend.data_parallel_rank
    return {f"{prefix}.{i * size + rank}": row for i, row in enumerate(rows)}


def measure(folder: Path, trial: Trial) -> None:
    """Load the miniature under the trial's layout, take one step of each model, and write what this rank has.

    Collective.
    """
    from learner.megatron.backend import MegatronBackend  # takes seconds, and prepares for megatron

    config = job(folder, trial)
    backend = MegatronBackend.of(config)
    packs = share(backend, microbatches(folder, backend.vocab_size))
    everywhere = [replace(pack, loss_mask=torch.ones_like(pack.loss_mask)) for pack in packs]
    temperature = temperature_of(config)
    rows = partial(backend.logprobs, everywhere, temperature)
    step = partial(backend.train_step, packs, loss_of(config), temperature, config.rl is not None)
    place = folder / trial.name
    _measure(place, backend, backend, rows, step, adapted=config.learner.lora is not None)
    if (critic := backend.critic) is not None:
        rows, step = partial(critic.values, everywhere), partial(critic.train_step, packs, value_loss_of(config))
        _measure(place / CRITIC, backend, critic, rows, step, adapted=False)


def _measure(
    place: Path,
    backend: Any,
    model: Any,
    rows: Callable[[], list[Tensor]],
    step: Callable[..., StepResult],
    *,
    adapted: bool,
) -> None:
    """Measure `model`, the backend or its critic, and write into the folder `place`. Collective."""
    lead: dict[str, Tensor] = {}

    def keep(prefix: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        lead.update({f"{prefix}.{name}": tensor.detach().float().clone() for name, tensor in tensors})

    def keep_gradients(prefix: str) -> None:
        if adapted:
            with gradients_in_place(model):
                keep(prefix, model.adapters.tensors())
        else:
            keep(prefix, gradients(model).items())

    def first(_: StepResult) -> bool:
        keep_gradients("gradient")
        return True

    def second(_: StepResult) -> bool:
        keep_gradients("again")
        return False  # takes no step

    keep("weight", model.export())
    if adapted:
        keep("adapter", model.export_adapters())
    mine = numbered(backend, rows(), "logprobs")
    result = step(accept=first)
    lead["figures"] = torch.tensor([result.loss, result.grad_norm], dtype=torch.float64)
    keep("trained", model.export_adapters() if adapted else model.export())
    mine |= numbered(backend, rows(), "after")
    model.save_hf(place / "saved")
    if adapted:  # the other matrix of each adapter was zero in the first step
        step(accept=second)
    if backend.rank == 0:
        mine |= lead
    place.mkdir(parents=True, exist_ok=True)
    save_file({name: x.contiguous() for name, x in mine.items()}, place / f"{backend.rank}.safetensors")


def run(arguments: Sequence[str]) -> int:
    folder, name, parent = Path(arguments[0]), arguments[1], int(arguments[2])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent
    setup_logging("certify", os.environ["RANK"], None, "error")
    quiet_libraries()
    logging.getLogger("megatron").setLevel(logging.ERROR)  # the bridge warns of every weight that bfloat16 rounds
    torch.set_num_threads(1)
    import learner.megatron.backend  # noqa: F401  (before the world: it prepares for megatron)

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = FileStore(str(folder / f"{name}.store"), ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    measure(folder, trial_of(name))
    torch.distributed.barrier()
    return 0


if __name__ == "__main__":
    leave(guard(run, sys.argv[1:]))
