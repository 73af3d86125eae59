"""Peak memory of the log-probability pass, forward and backward, against the naive one over the full logits.

    python bench/logprob_memory.py

Both get hidden states [tokens, hidden] and output weights [vocabulary, hidden] in float32. They return the
log-probabilities of random targets and leave the gradients of both inputs. Naive: logits = hidden @ weight.T,
log_softmax, gather. Every measurement is a process of its own. The figure is the kernel's peak of its resident memory
once the inputs exist, minus the memory that was resident before. The gradients are part of it.

`prompts`: time and memory of the same loss when only the last tenth of every document trains. One way computes every
place, as the output layer did once; the other one the places in the loss. They are compared on the output layer alone,
and on a step of a model of two layers with its optimizer, on one core.
"""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import harness

from bench.figures import ratios

TOKENS, HIDDEN, DOCUMENTS = 2048, 256, 4
VOCABULARIES = (32768, 65536, 131072, 262144)
WAYS = ("naive", "chunked")
PLACES = ("every", "loss")
PROMPT = 0.9


def resident(field: str) -> int:
    """Bytes of a memory field of /proc/self/status."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, f"/proc/self/status has no {field}"
    return int(found[1]) * 1024


def peak_of(work: Callable[[], object]) -> tuple[int, float]:
    """(bytes beyond those that were resident before, seconds) of `work()`."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident("VmRSS")
    _, seconds = harness.timed(work)
    return resident("VmHWM") - before, seconds


def inputs(vocabulary: int, tokens: int) -> tuple[Any, Any, Any]:
    """([tokens, HIDDEN] hidden states, [vocabulary, HIDDEN] weights, [tokens] targets), on one thread."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = (torch.randn(vocabulary, HIDDEN) / 16).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (tokens,))


def measure(way: str, vocabulary: int, tokens: int) -> dict[str, float]:
    """One pass in this process: {peak_bytes, checksum of results and gradients}."""
    import torch

    from learner.megatron.logprobs import logprobs_and_entropy

    def run(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if way == "chunked":
            found = logprobs_and_entropy(hidden, weight, targets, with_entropy=False)[0]
        else:
            found = (hidden @ weight.t()).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
        found.sum().backward()
        return found.detach()

    run(*inputs(8, 4))  # libraries set themselves up
    hidden, weight, targets = inputs(vocabulary, tokens)
    found: list[torch.Tensor] = []
    peak, _ = peak_of(lambda: found.append(run(hidden, weight, targets)))
    sums = [float(x.double().sum()) for x in (found[0], hidden.grad.abs(), weight.grad.abs())]
    return {"peak_bytes": peak, "logprobs": sums[0], "hidden_gradient": sums[1], "weight_gradient": sums[2]}


def compare(vocabulary: int, tokens: int) -> dict[str, object]:
    """Both ways in fresh processes; their results must agree."""
    found = {way: harness.apart(measure, way, vocabulary, tokens) for way in WAYS}
    for key in ("logprobs", "hidden_gradient", "weight_gradient"):
        one, other = (found[way][key] for way in WAYS)
        agree(f"vocabulary {vocabulary}: {key}", one, other)
    naive, chunked = (found[way]["peak_bytes"] for way in WAYS)
    gradients = 4 * HIDDEN * (vocabulary + tokens)
    return {
        "vocabulary": vocabulary,
        "chunked_kib_per_token_beyond_gradients": round((chunked - gradients) / tokens / 1024, 1),
        "naive_over_chunked": round(naive / chunked, 2),
    }


def agree(what: str, one: float, other: float) -> None:
    if abs(one - other) > 1e-4 * abs(one):
        raise SystemExit(f"{what} {one} and {other} differ")


# ---------------------------------------------------------------- prompts


def output_layer(places: str, vocabulary: int, tokens: int, rounds: int) -> dict[str, Any]:
    """{peak_bytes, seconds by round, checksum of a gradient} of the pass over one document, in this process."""
    import torch

    from common.config.schema import ParallelConfig
    from learner.megatron.logprobs import logprobs_and_entropy
    from learner.megatron.pack_layout import LossRows, PackPart

    hidden, weight, targets = inputs(vocabulary, tokens)
    mask = (torch.arange(tokens) >= PROMPT * tokens).float()
    part = PackPart.of((tokens,), ParallelConfig(), 0)
    rows = LossRows.of(part, mask if places == "loss" else torch.ones(tokens))

    def run() -> None:
        hidden.grad = weight.grad = None
        asked = rows.of_part(hidden), weight, rows.of_pack(targets)
        found = logprobs_and_entropy(*asked, with_entropy=False)[0]
        (rows.spread(found) * mask).sum().backward()

    measured = [peak_of(run) for _ in range(rounds)]
    return summary(measured) | {"check": float(weight.grad.double().abs().sum())}


def whole_step(places: str, vocabulary: int, tokens: int, rounds: int) -> dict[str, Any]:
    """The same of a supervised step of MegatronBackend; its checksum is the last loss."""
    import numpy as np
    import torch

    from common.config.schema import LearnerConfig, ModelConfig, OptimizerConfig
    from learner.batch.packing import Document, build
    from learner.loss.losses import cross_entropy
    from learner.megatron.backend import MegatronBackend
    from learner.megatron.pack_layout import LossRows

    torch.set_num_threads(1)
    if places == "every":
        rows_of = LossRows.of
        every = patch.object(LossRows, "of", lambda part, mask: rows_of(part, torch.ones_like(mask)))
        every.start()  # this process ends with the measurement
    with tempfile.TemporaryDirectory() as folder:
        shape = dict(hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=2)
        harness.qwen3(Path(folder), vocab_size=vocabulary, **shape)
        config = LearnerConfig(optimizer=OptimizerConfig(lr=1e-4))
        backend = MegatronBackend(ModelConfig(path=folder, dtype="float32", verify=False), config, 1000)
    draw = np.random.Generator(np.random.PCG64(0))
    length = tokens // DOCUMENTS + 1
    ids = draw.integers(3, vocabulary, (DOCUMENTS, length)).astype(np.int32)
    mask = (np.arange(length) > PROMPT * (length - 1)).astype(np.uint8)
    (batch,) = build([Document(row, mask) for row in ids], [[*range(DOCUMENTS)]])
    losses: list[float] = []

    def run() -> None:
        losses.append(backend.train_step([batch], cross_entropy).loss)

    run()  # the optimizer makes its states
    measured = [peak_of(run) for _ in range(rounds)]
    return summary(measured) | {"check": losses[-1]}


def summary(measured: list[tuple[int, float]]) -> dict[str, Any]:
    return {"peak_bytes": max(peak for peak, _ in measured), "seconds": [seconds for _, seconds in measured]}


def skipped(what: str, work: Callable[..., Any], vocabulary: int, options: harness.Options) -> dict[str, object]:
    """Every place over the places in the loss; their results must agree."""
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    arguments = vocabulary, options.tokens, options.rounds
    every, loss = (harness.apart(work, places, *arguments, cores=[0], **quiet) for places in PLACES)
    agree(f"{what}, vocabulary {vocabulary}: checksums", every["check"], loss["check"])
    return {
        "what": what,
        "vocabulary": vocabulary,
        "every_peak_mib": round(every["peak_bytes"] / 2**20, 1),
        "loss_peak_mib": round(loss["peak_bytes"] / 2**20, 1),
        "memory_every_over_loss": round(every["peak_bytes"] / loss["peak_bytes"], 2),
        "every_s": [round(x, 3) for x in every["seconds"]],
        "loss_s": [round(x, 3) for x in loss["seconds"]],
        "time_every_over_loss": [round(x, 2) for x in ratios(every["seconds"], loss["seconds"])],
    }


WORKS = {"output layer alone": output_layer, "whole step": whole_step}


@harness.script(tokens=TOKENS, vocabulary=list(VOCABULARIES), prompts=[32768, 131072], rounds=3)
def main(options: harness.Options) -> harness.Figures:
    rows = [compare(vocabulary, options.tokens) for vocabulary in options.vocabulary]
    prompts = [skipped(what, work, size, options) for what, work in WORKS.items() for size in options.prompts]
    return {"tokens": options.tokens, "hidden": HIDDEN, "rows": rows, "prompts": prompts, "rounds": options.rounds}
