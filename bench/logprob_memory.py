"""Peak memory of the log-probability pass, forward and backward, against the naive one over the full logits.

    python bench/logprob_memory.py

Both get hidden states [tokens, hidden] and output weights [vocabulary, hidden] in float32. They return the
log-probabilities of random targets and leave the gradients of both inputs. Naive: logits = hidden @ weight.T,
log_softmax, gather. Every measurement is a process of its own. The figure is the kernel's peak of its resident memory
once the inputs exist, minus the memory that was resident before. The gradients are part of it.
"""

import re
from pathlib import Path

import harness

TOKENS, HIDDEN = 2048, 256
VOCABULARIES = (32768, 65536, 131072, 262144)
WAYS = ("naive", "chunked")


def resident(field: str) -> int:
    """Bytes of a memory field of /proc/self/status."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, f"/proc/self/status has no {field}"
    return int(found[1]) * 1024


def measure(way: str, vocabulary: int, tokens: int) -> dict[str, float]:
    """One pass in this process: {peak_bytes, checksum of results and gradients}."""
    import torch

    from learner.megatron.logprobs import logprobs_and_entropy

    def run(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if way == "chunked":
            return logprobs_and_entropy(hidden, weight, targets, with_entropy=False)[0]
        return (hidden @ weight.t()).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)

    torch.set_num_threads(1)
    torch.manual_seed(0)
    small = [torch.randn(4, HIDDEN, requires_grad=True), torch.randn(8, HIDDEN, requires_grad=True)]
    run(*small, torch.zeros(4, dtype=torch.int64)).sum().backward()  # libraries set themselves up
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = (torch.randn(vocabulary, HIDDEN) / 16).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,))
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident("VmRSS")
    logprobs = run(hidden, weight, targets)
    logprobs.sum().backward()
    peak = resident("VmHWM") - before
    sums = [float(x.double().sum()) for x in (logprobs.detach(), hidden.grad.abs(), weight.grad.abs())]
    return {"peak_bytes": peak, "logprobs": sums[0], "hidden_gradient": sums[1], "weight_gradient": sums[2]}


def compare(vocabulary: int, tokens: int) -> dict[str, object]:
    """Both ways in fresh processes; their results must agree."""
    found = {way: harness.apart(measure, way, vocabulary, tokens) for way in WAYS}
    for key in ("logprobs", "hidden_gradient", "weight_gradient"):
        one, other = (found[way][key] for way in WAYS)
        if abs(one - other) > 1e-4 * abs(one):
            raise SystemExit(f"vocabulary {vocabulary}: {key} {one} and {other} differ")
    naive, chunked = (found[way]["peak_bytes"] for way in WAYS)
    gradients = 4 * HIDDEN * (vocabulary + tokens)
    return {
        "vocabulary": vocabulary,
        "chunked_kib_per_token_beyond_gradients": round((chunked - gradients) / tokens / 1024, 1),
        "naive_over_chunked": round(naive / chunked, 2),
    }


@harness.script(tokens=TOKENS, vocabulary=list(VOCABULARIES))
def main(options: harness.Options) -> harness.Figures:
    rows = [compare(vocabulary, options.tokens) for vocabulary in options.vocabulary]
    return {"rounds": 1, "tokens": options.tokens, "hidden": HIDDEN, "rows": rows}
