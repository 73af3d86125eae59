"""The learner on one GPU: steps, memory, log-probabilities, checkpoints, recomputation. Each stands beside its floor.

    python bench/gpu_learner.py [--short] [--output FILE] [--budget-s 200]

Random bfloat16 models of Qwen3's shapes, whose layers `slipstream plan` says to fit. Documents have equal lengths, so a
padded batch wastes nothing. Every job is a process of its own, and the result is written after each one.

- floor: a large product of bfloat16 matrices, and copies between device and pinned host memory
- train: MegatronBackend.train_step against Megatron's own loop, on the same model and optimizer, in turns
- memory: what a step of the learner allocates by kind, against the plan
- hugging_face: transformers in float32 under autocast, fused AdamW
- head: log-probabilities and gradients in chunks, against log_softmax over all logits
- recompute: the kinds of recomputation, and the optimizer's states in host memory
- checkpoint: the stall of a save, and the time to its end, against bare copies

MFU counts 6 operations for each weight of a product and token. Attention adds 12 x heads x head size for each token
that a token sees. Recomputation does not count (PaLM, arXiv 2204.02311, appendix B; half of a causal mask is empty). It
is over the floor's rate, and over the datasheet's. A loop whose logits do not fit takes several smaller microbatches
(`pieces`). Without a GPU the shapes are tiny.
"""

import multiprocessing
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, is_dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import harness
from gpu_learner_parts import Job, in_child
from random_qwen3 import Model

from common.config.parallel_layout import PLAIN
from common.process.lifecycle import die_with_parent

DATASHEET_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}  # dense bfloat16
JOB_S = 60.0  # limit of one job
SPARE = 1.05  # a job may use half of what the plan leaves free, since another kind follows where it does not fit
PLAIN_JOB_S = 10.0  # time that each job of plain layers gets


@dataclass(frozen=True)
class Scale:
    shapes: tuple[str, ...]
    layers: int  # at most
    tokens: tuple[int, ...]  # sizes of a microbatch
    document: int  # tokens
    vocabulary: int
    chunks: tuple[int, ...]  # rows of logits at a time
    head_tokens: tuple[int, ...]
    recompute_layers: int
    checkpoint_layers: int

    @property
    def large(self) -> str:
        """The shape of the parts that measure one."""
        return self.shapes[min(1, len(self.shapes) - 1)]


SCALES = {
    "full": Scale(("0.6B", "4B", "8B"), 24, (8192, 32768), 2048, 151936, (1024, 4096, 16384), (8192, 32768), 8, 4),
    "short": Scale(("0.6B", "4B"), 2, (8192,), 2048, 151936, (4096,), (8192,), 2, 1),
    "cpu": Scale(("tiny",), 2, (256, 512), 64, 512, (32, 128), (256,), 2, 2),
}


def largest(shape: str, scale: Scale, device: float) -> Model:
    """With the most layers that the plan says to fit: with the smallest microbatches, and recomputed with all."""
    model = Model(shape, scale.layers, scale.vocabulary)
    for layers in range(scale.layers, 0, -1):
        model = Model(shape, layers, scale.vocabulary)
        recomputed = all(model.fits(tokens, "full", device) for tokens in scale.tokens)
        if recomputed and model.fits(scale.tokens[0], "none", device):
            break
    return model


# ---------------------------------------------------------------- processes


def alone(job: Job, method: str, limit_s: float) -> harness.Figures:
    """The figures of `job` from a process of its own, which ends with it."""
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=in_child, args=(job, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(limit_s) else {"error": f"it took longer than {limit_s:.0f} s"}
    except EOFError:
        process.join(5)
        return {"error": f"its process ended with {process.exitcode}"}
    finally:
        process.kill()  # the device's memory is free when it is gone
        process.join()


def parent_of(plain: bool, pipe: Connection) -> None:
    """Imports the libraries once for all jobs that come, and runs each in a fork; sends (job, figures) of each."""
    die_with_parent()
    os.environ.update(PYTORCH_NVML_BASED_CUDA_CHECK="1", TORCHINDUCTOR_COMPILE_THREADS="1", OMP_NUM_THREADS="1")
    os.environ.update(CUDA_DEVICE_ORDER="PCI_BUS_ID", TOKENIZERS_PARALLELISM="false")
    if plain:
        os.environ[PLAIN] = "1"
    warnings.simplefilter("ignore")
    import torch
    import transformers  # noqa: F401

    import learner.megatron.backend  # noqa: F401

    torch.set_num_threads(1)
    jobs, memory, deadline = pipe.recv()
    method = "spawn" if "error" in alone(Job("probe", {}), "fork", JOB_S) else "fork"  # an import may have used CUDA
    kept = 1.0  # activations of layers, over the plan's
    for job in jobs:
        tried, found = job, harness.Figures()
        for recompute in recomputes(job, memory, kept):
            tried = Job(job.part, {**job.labels, **recompute})
            left = deadline - time.monotonic()
            found = alone(tried, method, min(JOB_S, left)) if left > 2 else {"error": "no time was left"}
            pipe.send((tried, found))
            if "does_not_fit" not in found:
                break
        if tried.labels.get("recompute") == "none":
            rows: list[harness.Figures] = found.get("memory", [])
            kept = max([kept, *(1.0 + row["off"] for row in rows if row["kind"] == "activations")])
    pipe.send(None)


def recomputes(job: Job, memory: float, kept: float) -> list[dict[str, str]]:
    """The kinds of recomputation to try with a job, the cheapest one that should fit first."""
    if job.part != "train":
        return [{}]
    fits = job.labels["model"].fits(job.labels["tokens"], "none", SPARE * memory, kept)
    return [{"recompute": kind} for kind in (("none", "full") if fits else ("full",))]


class Parent:
    """The process that imports the libraries, at once, and waits for its jobs."""

    def __init__(self, plain: bool) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=parent_of, args=(plain, theirs))
        self._process.start()
        theirs.close()

    def run(self, jobs: list[Job], memory: float, deadline: float) -> Iterator[tuple[Job, harness.Figures]]:
        try:
            self._pipe.send((jobs, memory, deadline))
            while self._pipe.poll(deadline - time.monotonic() + JOB_S) and (found := self._pipe.recv()) is not None:
                yield found
        except (EOFError, OSError):  # an import failed
            self._process.join(5)
            yield Job("imports", {}), {"error": f"the parent of the jobs ended with {self._process.exitcode}"}

    def end(self) -> None:
        self._process.kill()
        self._process.join()


# ---------------------------------------------------------------- all of them


def gpu() -> tuple[str, float]:
    """(name, bytes) of the first GPU; ("", 0) without one."""
    if (told := harness.accelerator()) == "none":
        return "", 0.0
    name, memory, _ = told.split("; ")[0].split(", ")  # NVIDIA H100 80GB HBM3, 81559 MiB, 580.159.04
    return name, float(memory.removesuffix(" MiB")) * (1 << 20)


def jobs_of(scale: Scale, memory: float, rounds: int, limit_s: float) -> list[Job]:
    """In the order of their worth: the last ones are left out where time is short."""
    models = {shape: largest(shape, scale, memory) for shape in scale.shapes}
    timing = {"rounds": rounds, "limit_s": limit_s}
    jobs = [Job("floor", {})]
    for tokens in scale.tokens:
        size = {"tokens": tokens, "document": scale.document}
        jobs += [Job("train", {"model": model, **size, **timing}) for model in models.values()]
        if tokens == scale.tokens[0]:
            jobs += [Job("hugging_face", {"model": model, **size, **timing}) for model in models.values()]
            jobs += measured_once(scale, models[scale.large], size, timing)
        else:
            jobs.append(Job("hugging_face", {"model": models[scale.large], **size, **timing}))
    return jobs


def measured_once(scale: Scale, big: Model, size: dict[str, int], timing: dict[str, Any]) -> Iterator[Job]:
    """Log-probabilities, recomputation and checkpoints, of one shape."""
    for tokens in scale.head_tokens:
        shown = {"shape": big.shape, "vocabulary": big.vocabulary, "tokens": tokens, "chunks": scale.chunks}
        yield Job("head", {**shown, "rounds": timing["rounds"]})
    fewest = Model(big.shape, min(big.layers, scale.checkpoint_layers), big.vocabulary)
    yield Job("checkpoint", {"model": fewest, "document": size["document"]})
    fewer = Model(big.shape, min(big.layers, scale.recompute_layers), big.vocabulary)
    kinds = [{"recompute": kind} for kind in ("none", "selective", "full")]
    for memory in (*kinds, {"offload_optimizer": True}):
        yield Job("recompute", {"model": fewer, **size, "memory": memory, **timing})


def with_mfu(found: Any, tflops: float, datasheet: float | None) -> Any:
    """`found` with the MFU beside every `model_tflops`, and numbers of five digits."""
    if isinstance(found, float):
        return float(f"{found:.5g}")
    if isinstance(found, list | tuple):
        return [with_mfu(each, tflops, datasheet) for each in found]
    if not isinstance(found, dict):
        return found
    out = {str(name): with_mfu(value, tflops, datasheet) for name, value in found.items()}
    if "model_tflops" in out and tflops:
        out["mfu"] = round(out["model_tflops"] / tflops, 4)
        out["mfu_of_datasheet"] = round(out["model_tflops"] / datasheet, 4) if datasheet else None
    return out


def labels_of(job: Job) -> dict[str, Any]:
    """The arguments of a job in its row."""
    out: dict[str, Any] = {}
    for name, value in job.labels.items():
        out |= asdict(value) if is_dataclass(value) and not isinstance(value, type) else {name: value}
    return {name: value for name, value in out.items() if name not in ("rounds", "limit_s", "chunks")}


def shown(part: str, row: dict[str, Any]) -> str:
    """One line for each way that was measured."""
    head = f"{part} {row.get('shape', '')} {row.get('tokens', '')} {row.get('recompute') or row.get('memory') or ''}"
    lines = [f"  {name}: {row[name]}" for name in ("error", "does_not_fit", "bare_does_not_fit") if name in row]
    names = ("way", "s", "tokens_per_s", "model_tflops", "tflops", "mfu", "pieces", "peak_gib", "between_gib")
    for way in (*row.get("ways", ()), *row.get("saves", ()), row):
        kept = {n: way[n] for n in (*names, "stall_s", "done_s", "stall_gb_s", "does_not_fit") if n in way}
        lines += ["  " + ", ".join(f"{n} {v}" for n, v in kept.items())] if kept else []
    for kind in row.get("memory", ()) if part == "train" else ():
        lines.append("  " + ", ".join(f"{n} {v}" for n, v in kind.items()))
    return "\n".join([f"{head.strip()}, {row['blocks']} layers, {row.get('took_s', 0):.1f} s", *lines])


@harness.script(short={"action": "store_true"}, rounds=5, budget_s=0.0, output="")
def main(options: harness.Options) -> harness.Figures:
    name, memory = gpu()
    scale = SCALES["cpu" if not name else "short" if options.short else "full"]
    rounds, limit_s = (2, 1.0) if options.short else (options.rounds, 4.0)
    deadline = time.monotonic() + (options.budget_s or (100.0 if options.short else 200.0))
    memory = memory or float("inf")
    jobs = jobs_of(scale, memory, rounds, limit_s)
    orders = {"plain": jobs}
    if name and find_spec("transformer_engine") is not None and not os.environ.get(PLAIN):
        some = [job for job in jobs if job.part == "train" and job.labels["tokens"] == scale.tokens[0]]
        orders = {"fused": jobs, "plain": some}
    parents = {blocks: Parent(blocks == "plain") for blocks in orders}
    datasheet = next((rate for model, rate in DATASHEET_TFLOPS.items() if model in name), None)
    result: harness.Figures = {"rounds": rounds, "gpu": name or "none", "datasheet_tflops": datasheet}
    tflops = 0.0
    try:
        for blocks, ordered in orders.items():
            # the plain ones come last and get their time
            kept = PLAIN_JOB_S * len(orders["plain"]) if blocks == "fused" else 0.0
            for job, found in parents[blocks].run(ordered, memory, deadline - kept):
                if job.part == "imports":
                    orders["plain"] = jobs
                tflops = found.get("tflops", tflops) if job.part == "floor" else tflops
                row = with_mfu({"blocks": blocks, **labels_of(job), **found}, tflops, datasheet)
                result.setdefault(job.part, []).append(row)
                print(shown(job.part, row), flush=True)
                harness.keep(options, result)
            parents[blocks].end()
    finally:
        for parent in parents.values():
            parent.end()
    return result
