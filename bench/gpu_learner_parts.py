"""The measurements of bench/gpu_learner.py: each function of PARTS runs in a process of its own."""

import contextlib
import gc
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import harness
from random_qwen3 import QWEN3, Model, batches_of, write_folder
from step_overhead import CLIP, LR, bare_loop

from bench.figures import ratios
from common.config.schema import MemoryConfig
from common.process.lifecycle import die_with_parent

GIB = 1 << 30
TOLERANCE = 3e-2  # between the losses of two loops on the same bfloat16 weights
LEAST_ROUNDS = 2
PEAKS = ("forward and backward", "update")  # most of what is allocated in them
PIECES = (1, 4, 16)  # microbatches of a step that are tried
MOST_LOGITS = 8192  # tokens whose logits of 150,000 words a GPU of 80 GB has room for, several times over


@dataclass(frozen=True)
class Job:
    part: str
    labels: dict[str, Any]  # arguments of the part's function


def device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def settle() -> None:
    """Wait for the device."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def allocated() -> int:
    import torch

    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def peak(reset: bool = False) -> int:
    """Most bytes allocated since the last reset."""
    import torch

    if not torch.cuda.is_available():
        return 0
    found = torch.cuda.max_memory_allocated()
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return found


def seconds_of(work: Callable[[], Any]) -> float:
    settle()
    began = time.perf_counter()
    work()
    settle()
    return time.perf_counter() - began


def rate(work: Callable[[], Any], amount: float, repeats: int) -> float:
    """`amount` per second, the median of `repeats` after a first one."""
    work()
    return amount / statistics.median(seconds_of(work) for _ in range(repeats))


def floor() -> harness.Figures:
    import torch

    here = device()
    size = 8192 if here.type == "cuda" else 256
    a = torch.randn(size, size, dtype=torch.bfloat16, device=here)
    at_once = 20

    def products() -> None:
        for _ in range(at_once):
            torch.mm(a, a, out=out)

    out = torch.empty_like(a)
    found: harness.Figures = {"matrix": size, "tflops": rate(products, at_once * 2.0 * size**3 / 1e12, 9)}
    found |= copies()
    if here.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        found |= {"device": torch.cuda.get_device_name(), "total_gib": total / GIB, "free_gib": free / GIB}
    return found


def copies() -> harness.Figures:
    """GB/s of bare copies between the device and host memory."""
    import torch

    here = device()
    size = GIB if here.type == "cuda" else 1 << 20
    on_device = torch.empty(size, dtype=torch.uint8, device=here)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=here.type == "cuda")
    return {
        "to_pinned_gb_s": rate(lambda: pinned.copy_(on_device), size / 1e9, 5),
        "from_pinned_gb_s": rate(lambda: on_device.copy_(pinned), size / 1e9, 5),
        "to_new_pageable_gb_s": rate(lambda: on_device.to("cpu", copy=True), size / 1e9, 2),
    }


def backend_of(model: Model, **memory: Any) -> Any:
    """The learner's backend with random weights, made on the device."""
    import torch

    from common.config.schema import LearnerConfig, ModelConfig, OptimizerConfig
    from learner.megatron.backend import MegatronBackend

    config = LearnerConfig(optimizer=OptimizerConfig(lr=LR, grad_clip=CLIP), memory=MemoryConfig(**memory))
    with tempfile.TemporaryDirectory() as place:
        write_folder(Path(place), model)
        # as for a start from a checkpoint, so the folder's weights are not read
        backend = MegatronBackend(ModelConfig(path=place, verify=False), config, 1000, resumes=True)
    torch.manual_seed(0)
    with torch.no_grad(), backend.on_device(), backend.offload.optimizer():
        for parameter in (p for chunk in backend.chunks for p in chunk.module.parameters()):
            parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
        backend.optimizer.start_afresh()
    return backend


def learner_step(backend: Any, batches: list[Any]) -> Callable[[], float]:
    from learner.loss.losses import cross_entropy

    return lambda: backend.train_step(batches, cross_entropy).loss


@contextlib.contextmanager
def own_output_layer(backend: Any) -> Iterator[None]:
    """Within, the model has Megatron's output layer, which the learner's head replaces."""
    layer = backend.chunks[0].module.output_layer
    ours = layer.__dict__.pop("forward")
    try:
        yield
    finally:
        layer.forward = ours


def bare_step(backend: Any, batches: list[Any]) -> Callable[[], float]:
    """Megatron's loop on the backend's model and optimizer."""
    loop = bare_loop(backend.chunks[0], backend.optimizer.megatron, batches)

    def step() -> float:
        with own_output_layer(backend):
            return loop()

    return step


def first_that_fits(makers: Iterable[tuple[Any, Callable[[], Callable[[], float]]]]) -> tuple[Any, Any, float]:
    """(name, step, loss) of the first of (name, maker of a step) whose step fits in memory; `peak` is that step's."""
    import torch

    tried: list[str] = []
    for name, make in makers:
        peak(reset=True)
        try:
            step = make()
            return name, step, step()
        except torch.cuda.OutOfMemoryError as error:
            tried.append(f"{name}: {str(error).splitlines()[0][:120]}")
            traceback.clear_frames(error.__traceback__)
        gc.collect()
        torch.cuda.empty_cache()
    raise MemoryError("; ".join(tried))


def in_turns(steps: dict[str, Callable[[], float]], rounds: int, limit_s: float) -> dict[str, list[float]]:
    """Seconds of each step, in turns: at least LEAST_ROUNDS rounds, and until `limit_s` are used."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    until = time.perf_counter() + limit_s
    for number in range(rounds):
        if number >= LEAST_ROUNDS and time.perf_counter() > until:
            break
        for name in [*steps][:: 1 if number % 2 else -1]:
            found[name].append(seconds_of(steps[name]))
    return found


def row_of(model: Model, tokens: int, document: int, seconds: list[float], **more: Any) -> harness.Figures:
    median = statistics.median(seconds)
    return {
        "s": median,
        "rounds_s": seconds,
        "tokens_per_s": tokens / median,
        "model_tflops": model.flops(tokens, document) / median / 1e12,
        **more,
    }


def resident_of(backend: Any) -> dict[str, int]:
    """Bytes of the tensors of each kind."""
    storages = {
        p.untyped_storage()._cdata: p.untyped_storage().nbytes()
        for chunk in backend.chunks
        for p in chunk.module.parameters()
    }
    buffers = [b for chunk in backend.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    states = 0
    for each in backend.optimizer.megatron.chained_optimizers:
        for parameter in (p for group in each.optimizer.param_groups for p in group["params"]):
            kept = [parameter, *each.optimizer.state.get(parameter, {}).values()]
            states += sum(t.nbytes for t in kept if hasattr(t, "nbytes") and t.dim())
    return {
        "weights": sum(storages.values()),
        "gradients": sum(b.grad_data.nbytes for b in buffers),
        "optimizer": states,
    }


def memory_of(backend: Any, batches: list[Any], planned: dict[str, int]) -> list[harness.Figures]:
    """One step of the learner, by kind: bytes allocated beyond what was there before, against the plan."""
    import torch

    from learner.loss.losses import cross_entropy

    head = backend.schedule._head
    seen: dict[str, int] = {}

    def at_head(*arguments: Any, **named: Any) -> Any:
        seen["head"] = allocated()
        return own(*arguments, **named)

    def after_backward(_: Any) -> bool:
        settle()
        seen["backward"] = peak(reset=True)
        return True

    own, head.logprobs = head.logprobs, at_head
    peak(reset=True)
    before = allocated()
    backend.train_step(batches, cross_entropy, accept=after_backward)
    settle()
    del head.logprobs
    held = resident_of(backend)
    found = dict(held)
    if torch.cuda.is_available():
        found["activations"] = seen["head"] - before
        found["logits"] = seen["backward"] - seen["head"]
        found["forward and backward"] = seen["backward"]
        found["update"] = peak()
    rows = [
        {"kind": kind, "gib": size / GIB, "planned_gib": planned[kind] / GIB, "off": size / planned[kind] - 1.0}
        for kind, size in found.items()
    ]
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        rows.append({"kind": "device in use", "gib": (total - free) / GIB})
        rows.append({"kind": "not by these tensors, between steps", "gib": (before - sum(held.values())) / GIB})
    return rows


def train(model: Model, tokens: int, document: int, recompute: str, rounds: int, limit_s: float) -> harness.Figures:
    """The learner's step and Megatron's own, and the memory of the learner's."""
    backend = backend_of(model, recompute=recompute)
    batches = batches_of(model, tokens, document)
    steps = {"learner": learner_step(backend, batches)}
    steps["learner"]()  # the optimizer makes its states
    kinds = memory_of(backend, batches, model.planned(tokens, recompute))
    found: harness.Figures = {"memory": kinds}
    pieces = {"learner": 1}
    peaks = {"learner": max((row["gib"] for row in kinds if row["kind"] in PEAKS), default=0.0)}
    loss = -sum(float(x.sum()) for x in backend.logprobs(batches)) / tokens
    makers = [
        (n, lambda n=n: bare_step(backend, batches_of(model, tokens, document, n)))
        for n in PIECES
        if n <= tokens // document
    ]
    try:
        pieces["bare"], steps["bare"], other = first_that_fits(makers)
        peaks["bare"] = peak() / GIB
    except MemoryError as error:
        found["bare_does_not_fit"] = str(error)
    else:
        if abs(loss - other) > TOLERANCE:
            found["error"] = f"the ways do different work: their losses are {loss} and {other}"
    seconds = in_turns(steps, rounds, limit_s)
    found["ways"] = [
        row_of(model, tokens, document, took, way=way, pieces=pieces[way], peak_gib=peaks[way])
        for way, took in seconds.items()
    ]
    if "bare" in seconds:
        pairs = ratios(seconds["learner"], seconds["bare"])
        found["learner_over_bare"] = {"median": statistics.median(pairs), "lowest": min(pairs), "highest": max(pairs)}
    return found


def hugging_face(model: Model, tokens: int, document: int, rounds: int, limit_s: float) -> harness.Figures:
    """transformers' model and torch's optimizer."""
    import torch
    from transformers import Qwen3ForCausalLM

    here = device()
    with torch.device(here):
        network = Qwen3ForCausalLM(model.config()).float().train()
    network.config.use_cache = False
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=here.type == "cuda"
    )
    rows = torch.randint(3, model.vocabulary, (tokens // document, document + 1), device=here)

    network(rows[:1, :64]).logits.float().sum().backward()
    optimizer.step()  # makes the states, so that a step that fits once fits again

    def stepper(pieces: int, again: bool) -> Callable[[], float]:
        if again:
            network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

        def step() -> float:
            optimizer.zero_grad()
            total = torch.zeros((), device=here)
            for part in rows.chunk(pieces):
                with torch.autocast(here.type, torch.bfloat16):
                    logits = network(part[:, :-1]).logits.float()
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / pieces
                del logits
                loss.backward()
                total += loss.detach()
            torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)
            optimizer.step()
            return total.item()

        return step

    least = max(1, tokens // MOST_LOGITS)
    tries = [(least, False), *((pieces, True) for pieces in (least, *PIECES) if least <= pieces <= len(rows))]
    (pieces, again), step, loss = first_that_fits([(each, partial(stepper, *each)) for each in tries])
    peak(reset=True)
    seconds = in_turns({"hugging_face": step}, rounds, limit_s)["hugging_face"]
    more = {"way": "hugging_face", "recompute": "full" if again else "none", "pieces": pieces, "loss": loss}
    return {"ways": [row_of(model, tokens, document, seconds, peak_gib=peak() / GIB, **more)]}


def head(shape: str, vocabulary: int, tokens: int, chunks: Sequence[int], rounds: int) -> harness.Figures:
    """Log-probabilities of targets and both gradients: our way with several sizes of chunks, and the naive one."""
    import torch

    from learner.megatron.logprobs import logprobs_and_entropy

    here = device()
    torch.manual_seed(0)
    made = torch.randn(tokens, QWEN3[shape][0], device=here).bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, QWEN3[shape][0], device=here) * 0.02).bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=here)

    def chunked(elements: int | None = None, kept: int | None = None) -> Callable[[], Any]:
        sizes = (1.0, None, elements, kept)  # temperature, no group of ranks, sizes of a chunk and of what is kept
        return lambda: logprobs_and_entropy(made, weight, targets, *sizes, with_entropy=False)[0]

    def naive() -> Any:
        return (made @ weight.t()).float().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)

    ways: dict[str, Callable[[], Any]] = {"chunked, as by default": chunked()}
    for rows in chunks:
        ways[f"chunks of {rows} rows"] = chunked(rows * vocabulary)
        ways[f"chunks of {rows} rows, none kept"] = chunked(rows * vocabulary, kept=1)
    ways["naive"] = naive
    table: list[harness.Figures] = []
    for name, way in ways.items():
        made.grad = weight.grad = None
        before = allocated()

        def both(way: Callable[[], Any] = way) -> float:
            made.grad = weight.grad = None
            found = way()
            found.sum().backward()
            return float(found.detach().double().sum())

        try:
            _, step, total = first_that_fits([(name, lambda both=both: both)])
        except MemoryError as error:
            table.append({"way": name, "does_not_fit": str(error)})
            continue
        peak(reset=True)
        seconds = [seconds_of(step) for _ in range(rounds)]
        measured = {"s": statistics.median(seconds), "rounds_s": seconds, "peak_gib": (peak() - before) / GIB}
        operations = 6.0 * tokens * vocabulary * QWEN3[shape][0]  # three products
        table.append({"way": name, "sum": total, "tflops": operations / measured["s"] / 1e12, **measured})
    sums = [row["sum"] for row in table if "sum" in row]
    if max(sums) - min(sums) > TOLERANCE * tokens:
        return {"ways": table, "error": f"the ways do different work: their sums are {sums}"}
    return {"ways": table}


def recompute(
    model: Model, tokens: int, document: int, memory: dict[str, Any], rounds: int, limit_s: float
) -> harness.Figures:
    """A step of the learner with these keys of learner.memory."""
    backend = backend_of(model, **memory)
    step = learner_step(backend, batches_of(model, tokens, document))
    step()
    peak(reset=True)
    seconds = in_turns({"learner": step}, rounds, limit_s)["learner"]
    return row_of(model, tokens, document, seconds, peak_gib=peak() / GIB, between_gib=allocated() / GIB)


def checkpoint(model: Model, document: int) -> harness.Figures:
    """Two saves of weights and states, each into a new folder; the former one is deleted between them."""
    backend = backend_of(model)
    learner_step(backend, batches_of(model, document, document))()
    size = 7 * resident_of(backend)["weights"]  # 14 bytes for each parameter
    place = next(p for p in ("/dev/shm", tempfile.gettempdir()) if shutil.disk_usage(p).free > 1.5 * size)
    saves: list[harness.Figures] = []
    with tempfile.TemporaryDirectory(dir=place) as folder:
        for number in range(2):
            path = Path(folder) / f"checkpoint-{number}"
            settle()
            began = time.perf_counter()
            backend.start_checkpoint(path)
            stall = time.perf_counter() - began
            backend.checkpoint_done(wait=True)
            took = time.perf_counter() - began
            written = sum(file.stat().st_size for file in path.iterdir())
            saves.append({"stall_s": stall, "done_s": took, "gb": written / 1e9, "stall_gb_s": written / stall / 1e9})
            shutil.rmtree(path)
    return {"place": place, "saves": saves, **copies()}


def probe() -> None:
    """Fails where a fork cannot use the device."""
    import torch

    torch.ones(1, device=device())


PARTS: dict[str, Callable[..., harness.Figures | None]] = {
    "probe": probe,
    "floor": floor,
    "train": train,
    "hugging_face": hugging_face,
    "head": head,
    "recompute": recompute,
    "checkpoint": checkpoint,
}


def in_child(job: Job, pipe: Connection) -> None:
    """Sends the figures of `job`, or why there are none."""
    die_with_parent()
    began = time.perf_counter()
    try:
        found = PARTS[job.part](**job.labels) or {}
    except Exception as error:
        if type(error).__name__ in ("OutOfMemoryError", "MemoryError"):
            found = {"does_not_fit": str(error)[:300]}
        else:
            found = {"error": f"{type(error).__name__}: {error}"[:500], "traceback": traceback.format_exc()[-1500:]}
    pipe.send(found | {"took_s": time.perf_counter() - began})
