"""What an engine's parameters hold, in Hugging Face terms: the proof that a flip arrived where sampling reads from.

vLLM fuses projections (qkv_proj, gate_up_proj), ties lm_head and pads vocabularies; this undoes all three by
looking at the live parameters, never at what was loaded.
"""

from collections.abc import Iterator
from typing import Any

import torch
import xxhash

from common.weights.layout import Entry, Layout


class Unreadable(Exception):
    """A published tensor has no counterpart among the engine's parameters."""


def tensors(model: Any, layout: Layout) -> Iterator[tuple[Entry, torch.Tensor]]:
    """(entry, live tensor of the entry's shape) in layout order; views, no copies.

    Args:
        model: a vLLM model without tensor parallelism.

    Raises:
        Unreadable: naming the tensor, when it cannot be found or has another shape or dtype.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    packed = getattr(model, "packed_modules_mapping", {})
    for entry in layout.entries:
        found = parameters.get(entry.name)
        if found is None:
            found = _part_of_fused(model, parameters, packed, entry.name)
        if found.dim() == len(entry.shape) and found.shape[1:] == entry.shape[1:] and len(found) > entry.shape[0]:
            found = found[: entry.shape[0]]  # padded vocabulary rows
        dtype = str(found.dtype).removeprefix("torch.")
        if tuple(found.shape) != entry.shape or dtype != entry.dtype:
            has = f"{dtype} {tuple(found.shape)}"
            raise Unreadable(f"{entry.name} was published as {entry.dtype} {entry.shape}, the engine has {has}")
        yield entry, found.data


def checksum(model: Any, layout: Layout) -> str:
    """Checksum of the live parameters in layout order; equals the publisher's when, and only when, all bytes do.

    Raises:
        Unreadable: as `tensors`.
    """
    digest = xxhash.xxh3_128()
    at = 0
    for entry, tensor in tensors(model, layout):
        digest.update(bytes(entry.offset - at))  # alignment gaps are zero in the buffer
        data = tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy()
        digest.update(memoryview(data))
        at = entry.offset + entry.size_bytes
    digest.update(bytes(layout.total_bytes - at))
    return digest.hexdigest()


def _part_of_fused(
    model: Any, parameters: dict[str, torch.Tensor], packed: dict[str, list[str]], name: str
) -> torch.Tensor:
    """The rows of a fused projection that `name` (…q_proj.weight) was loaded into."""
    prefix, _, kind = name.rpartition(".")
    parent, _, leaf = prefix.rpartition(".")
    for fused, parts in packed.items():
        target = f"{parent}.{fused}.{kind}"
        if leaf in parts and target in parameters:
            sizes = model.get_submodule(f"{parent}.{fused}").output_partition_sizes
            start = sum(sizes[: parts.index(leaf)])
            return parameters[target][start : start + sizes[parts.index(leaf)]]
    raise Unreadable(f"{name} was published, but the engine has no parameter for it")
