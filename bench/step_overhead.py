"""Time of a learner's step, against the bare work: float32 and bfloat16 on one core, and float32 on two.

Three ways to do one supervised step (forward, backward, clip, AdamW) on the same documents, in turns in one process:

- learner: MegatronBackend.train_step with the cross-entropy loss of `slipstream sft`
- bare: megatron-core alone: its model, schedule, distributed optimizer and vocabulary-parallel cross-entropy, packed
- hugging_face: the transformers model on a padded batch, torch's cross_entropy and AdamW; autocast for bfloat16

On one core it is CPU time, on two the time that passes.

    python bench/step_overhead.py [--rounds 20]
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness

from bench.figures import ratios

SHAPES = {  # documents of so many tokens, in one microbatch
    "wide": dict(hidden=256, intermediate=1024, layers=4, vocabulary=4096, documents=16, tokens=256),
    "quickstart": dict(hidden=128, intermediate=256, layers=2, vocabulary=128, documents=128, tokens=44),
    "vocabulary": dict(hidden=256, intermediate=1024, layers=2, vocabulary=32000, documents=8, tokens=256),
}
CASES = {  # shape, dtype, cores
    **{name: (name, "float32", 1) for name in SHAPES},
    "wide, bfloat16": ("wide", "bfloat16", 1),
    "wide, 2 cores": ("wide", "float32", 2),
}
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}  # between the losses of the ways
LR, CLIP = 1e-4, 1.0


def documents(shape: dict[str, int]) -> list[Any]:
    import numpy as np

    from learner.batch.packing import Document

    draw = np.random.Generator(np.random.PCG64(0))
    size = (shape["documents"], shape["tokens"] + 1)
    rows = draw.integers(3, shape["vocabulary"], size).astype(np.int32)
    return [Document(row, np.ones(len(row), dtype=np.uint8)) for row in rows]


def learner_step(folder: Path, batch: Any, dtype: str) -> Callable[[], float]:
    from common.config.schema import LearnerConfig, ModelConfig, OptimizerConfig
    from learner.loss.losses import cross_entropy
    from learner.megatron.backend import MegatronBackend

    config = LearnerConfig(optimizer=OptimizerConfig(lr=LR, grad_clip=CLIP))
    backend = MegatronBackend(ModelConfig(path=str(folder), dtype=dtype, verify=False), config, 1000)
    return lambda: backend.train_step([batch], cross_entropy).loss


def bare_step(folder: Path, batch: Any, dtype: Any) -> Callable[[], float]:
    """Needs megatron's groups, which the learner's backend has made."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from common.config.schema import MoeConfig, ParallelConfig
    from learner.megatron.conversion import model as learner_model
    from learner.megatron.conversion.hf_folder import read_config

    # only the conversion is the learner's; what runs below is megatron-core's
    built = learner_model.build(folder, read_config(folder), dtype, ParallelConfig(), MoeConfig())
    config = built.config
    config.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    chunk = DistributedDataParallel(config=config, ddp_config=ddp, module=built.chunks[0])
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=LR, adam_beta1=0.9, adam_beta2=0.95, weight_decay=0.0, clip_grad=CLIP,
            params_dtype=dtype, bf16=dtype == torch.bfloat16, use_distributed_optimizer=True,
        ),
        [chunk],
    )  # fmt: skip
    return bare_loop(chunk, optimizer, [batch])


def bare_loop(chunk: Any, optimizer: Any, batches: list[Any]) -> Callable[[], float]:
    """Steps of Megatron's schedule on a wrapped model: its output layer, cross-entropy and optimizer.

    `batches` are the microbatches of every step. The steps return the mean loss.
    """
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    device = next(chunk.parameters()).device
    run = get_forward_backward_func()
    total = sum(len(batch.tokens) for batch in batches)
    prepared = [
        (
            [x.to(device) for x in (batch.tokens, batch.positions, batch.targets, batch.loss_mask)],
            torch.tensor([0, *batch.document_lengths]).cumsum(0).int().to(device),
            max(batch.document_lengths),
        )
        for batch in batches
    ]

    def forward(iterator: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
        (tokens, positions, targets, mask), bounds, longest = next(iterator)
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        losses = model(tokens[None], positions[None], None, labels=targets[None], packed_seq_params=packed)

        def loss(output: Any) -> tuple[Any, Any, Any]:
            loss_sum = (output.squeeze(0) * mask).sum()
            return loss_sum, mask.sum().int(), loss_sum.detach()

        return losses, loss

    def step() -> float:
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = run(
            forward_step_func=forward, data_iterator=iter(prepared), model=chunk, num_microbatches=len(batches),
            seq_length=len(batches[0].tokens), micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        optimizer.step()
        return float(sum(reports)) / total

    return step


def hugging_face_step(folder: Path, rows: list[Any], dtype: Any) -> Callable[[], float]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    tokens = torch.stack([torch.from_numpy(row.tokens).long() for row in rows])

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = model(tokens[:, :-1]).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return loss.item()

    return step


def measure(name: str, rounds: int) -> dict[str, list[float]]:
    """All three on one case, in turns; in this process."""
    import torch

    shape_name, kind, cores = CASES[name]
    dtype = getattr(torch, kind)
    torch.set_num_threads(cores)
    shape = SHAPES[shape_name]
    rows = documents(shape)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        harness.qwen3(
            folder, vocab_size=shape["vocabulary"], hidden_size=shape["hidden"],
            intermediate_size=shape["intermediate"], num_hidden_layers=shape["layers"],
        )  # fmt: skip
        from learner.batch.packing import build

        batch = build(rows, [list(range(len(rows)))])[0]
        steps = {"learner": learner_step(folder, batch, kind)}
        steps["bare"] = bare_step(folder, batch, dtype)
        steps["hugging_face"] = hugging_face_step(folder, rows, dtype)
    losses = [[step() for _ in range(3)][-1] for step in steps.values()]
    assert max(losses) - min(losses) < TOLERANCE[kind], f"the ways do different work: {losses}"
    clock = time.process_time if cores == 1 else time.perf_counter  # threads that wait for each other spin

    def seconds(way: str, _: int) -> float:
        began = clock()
        steps[way]()
        return clock() - began

    return harness.in_turns(list(steps), range(rounds), seconds)


def over(seconds: dict[str, list[float]], way: str) -> dict[str, float]:
    """Time of the learner's step over another way's."""
    pairs = [round(x, 3) for x in ratios(seconds["learner"], seconds[way])]
    return {"median": round(statistics.median(pairs), 3), "lowest": min(pairs), "highest": max(pairs)}


@harness.script(rounds=20)
def main(options: harness.Options) -> harness.Figures:
    shapes = {}
    for name, (_, _, cores) in CASES.items():
        quiet = {"OMP_NUM_THREADS": str(cores), "PYTHONWARNINGS": "ignore"}
        seconds = harness.apart(measure, name, options.rounds, cores=range(cores), **quiet)
        ways = {"learner_over_bare_megatron": "bare", "learner_over_hugging_face": "hugging_face"}
        shapes[name] = {figure: over(seconds, way) for figure, way in ways.items()}
    return {"rounds": options.rounds, "shapes": shapes}
