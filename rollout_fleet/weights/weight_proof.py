"""Reads an engine's parameters in Hugging Face terms: the proof that a flip changed the weights that sampling uses.

vLLM fuses projections (qkv_proj, gate_up_proj), stacks experts (w13_weight, w2_weight), ties lm_head and pads
vocabularies. This undoes all of it and reads only the live parameters, never the loaded buffer.

An engine that rounds its weights has other bytes than were published. Its parameters are compared with the same
rounding of the published version, computed here.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash

from common.weights.wire import flat_buffer
from common.weights.wire.flat_buffer import WordSums
from common.weights.wire.layout import WORDS, Entry, Layout
from rollout_fleet.weights.rounding import FP8, per_channel

PIECE_BYTES = 16 << 20  # that travel from a device at once: more are not faster (bench/results/gpu_weights.json)
_ELSEWHERE = torch.empty(0)  # stands for a parameter that another worker has
_DERIVED = re.compile(r"(.*\.)?W_(UK_T|UV|K|V)\w*")  # computed by vLLM from kv_b_proj; worker_process.py renews them
_EXPERT = re.compile(r"(?P<experts>(?:.*\.)?experts)\.(?P<number>\d+)\.(?P<projection>\w+)\.(?P<kind>\w+)")


class Proof(msgspec.Struct, frozen=True):
    """The checksum of the parameters after a flip to `version`; `error` when they could not be read."""

    incarnation: int
    version: int
    checksum: str = ""
    error: str = ""
    parts: dict[int, str] = {}  # instead of `checksum`: the checksums of the sources' parts that this worker computed


def whole_checksum(proofs: Sequence[Proof]) -> str:
    """The version's checksum in the proofs of all workers of an engine."""
    parts = {number: part for proof in proofs for number, part in proof.parts.items()}
    return flat_buffer.combined([parts[number] for number in sorted(parts)]) if parts else proofs[0].checksum


class Live(NamedTuple):
    """A published tensor among the engine's parameters."""

    entry: Entry
    held: torch.Tensor  # the parameter, or the part of a fused one
    scale: torch.Tensor | None = None  # [rows, 1] float32, of rounded weights


class Unreadable(Exception):
    """A published tensor has no counterpart among the engine's parameters."""


def checksum(model: Any, layout: Layout) -> str:
    """Checksum of the live parameters in layout order, without tensor parallelism; the publisher's if all bytes agree.

    Raises Unreadable, naming the tensor, when it cannot be found or has another shape or dtype.
    """
    if layout.checksums == WORDS:
        sums = WordSums()
        for entry, found in _published(model, layout):
            sums.add(found, entry.offset)
        return sums.hexdigest()
    digests = [xxhash.xxh3_128()]  # one for each source's part
    at = 0
    starts = {*layout.starts[1:]}
    for offset, data in _in_host((entry.offset, found) for entry, found in _published(model, layout)):
        digests[-1].update(bytes(offset - at))  # alignment gaps are zero in the buffer
        if offset in starts:
            digests.append(xxhash.xxh3_128())
        digests[-1].update(data.numpy().data)
        at = offset + len(data)
        del data  # the next copy takes its memory
    digests[-1].update(bytes(layout.total_bytes - at))
    return flat_buffer.combined([digest.hexdigest() for digest in digests])


def _published(model: Any, layout: Layout) -> Iterator[tuple[Entry, torch.Tensor]]:
    """The live parameters without padded rows; raises as `checksum`."""
    for entry, found, _ in _live(model, layout):
        if found.dim() == len(entry.shape) and found.shape[1:] == entry.shape[1:] and len(found) > entry.shape[0]:
            found = found[: entry.shape[0]]  # padded vocabulary rows
        dtype = str(found.dtype).removeprefix("torch.")
        if tuple(found.shape) != entry.shape or dtype != entry.dtype:
            has = f"{dtype} {tuple(found.shape)}"
            raise Unreadable(f"{entry.name} was published as {entry.dtype} {entry.shape}, the engine has {has}")
        yield entry, found


def _pieces(tensor: torch.Tensor, offset: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
    """(offset, [n] uint8) of at most PIECE_BYTES, in order: in the memory of `tensor` where that is contiguous."""
    lines = torch.atleast_1d(tensor)
    for some in lines.split(max(1, PIECE_BYTES // max(1, lines[:1].nbytes))):
        for piece in some.contiguous().view(-1).view(torch.uint8).split(PIECE_BYTES):
            yield offset, piece
            offset += len(piece)


@cache
def _bounce(device: torch.device) -> list[torch.Tensor]:
    """Two buffers in host memory, used again for every version: a first touch of memory takes longer than a copy.

    They serve one proof at a time.
    """
    return [flat_buffer.pinned(flat_buffer.buffer(PIECE_BYTES), device) for _ in range(2)]


def _in_host(tensors: Iterable[tuple[int, torch.Tensor]]) -> Iterator[tuple[int, torch.Tensor]]:
    """(offset, [n] uint8) of their bytes, each until the next is asked for; a device brings that one meanwhile."""
    coming: tuple[int, torch.Tensor, Any] | None = None
    turn = 0
    for start, tensor in tensors:
        if not tensor.is_cuda:
            yield start, tensor.contiguous().view(-1).view(torch.uint8)
            continue
        for offset, piece in _pieces(tensor, start):
            turn = 1 - turn
            there = _bounce(tensor.device)[turn][: len(piece)]
            there.copy_(piece, non_blocking=True)
            copied = torch.cuda.current_stream(tensor.device).record_event()
            if coming is not None:
                yield _arrived(*coming)
            coming = offset, there, copied
    if coming is not None:
        yield _arrived(*coming)


def _arrived(offset: int, there: torch.Tensor, copied: Any) -> tuple[int, torch.Tensor]:
    copied.synchronize()
    return offset, there


def check_shard(
    model: Any, layout: Layout, flat: torch.Tensor, rank: int, size: int, dtype: torch.dtype | None = None
) -> None:
    """Compare the live parameters of worker `rank` of `size` with their shards of `flat` [total_bytes] uint8, all bits.

    Other workers compare the layers of their pipeline stages and their experts. `dtype`: that of an engine which rounds
    its weights; scales are compared, too. Raises Unreadable, naming the tensor, when its shard is another one or cannot
    be told.
    """
    published = dict(flat_buffer.view(flat, layout))
    for entry, live, scale in _live(model, layout):
        whole = published[entry.name] if dtype is None else published[entry.name].to(dtype)
        if scale is not None:
            whole, expected = per_channel(whole)
            _compare(model, entry, scale, expected, rank, size)
        _compare(model, entry, live, whole, rank, size)


def part_checksums(flat: torch.Tensor, layout: Layout, rank: int, size: int) -> dict[int, str]:
    """The checksums of those parts of `flat` [total_bytes] uint8 that worker `rank` of `size` has to read."""
    own = [*enumerate(layout.parts)][rank::size]
    return {number: flat_buffer.checksum(flat[part], layout.checksums) for number, part in own}


def _compare(model: Any, entry: Entry, live: torch.Tensor, whole: torch.Tensor, rank: int, size: int) -> None:
    live, expected = _shard(model, entry, live, whole, rank, size)
    if live.dtype != expected.dtype or live.shape != expected.shape:
        has = f"{live.dtype} {tuple(live.shape)}"
        raise Unreadable(f"{entry.name} of {entry.shape} on worker {rank} of {size}: the engine has {has}")
    ours = _in_host([(0, live)]) if live.is_cuda and expected.is_cpu else _pieces(live)
    if not all(_same(one, other) for (_, one), (_, other) in zip(ours, _pieces(expected), strict=True)):
        raise Unreadable(f"worker {rank} of {size} has another shard of {entry.name} than was published")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    # numpy compares bytes several times as fast as torch does in host memory
    return np.array_equal(one.numpy(), other.numpy()) if one.is_cpu else torch.equal(one, other)


def _shard(
    model: Any, entry: Entry, live: torch.Tensor, whole: torch.Tensor, rank: int, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(live, expected) of one worker. The shapes show the cut dimension, and a vocabulary's module shows its rows."""
    try:
        module = model.get_submodule(entry.name.rpartition(".")[0])
    except AttributeError:  # a part of a fused one
        module = None
    indices = getattr(module, "shard_indices", None)
    if indices is not None:
        start, end = indices.org_vocab_start_index, indices.org_vocab_end_index
        return live[: end - start], whole[start:end]
    for dim in range(min(live.dim(), whole.dim())):
        have, all_of_it = live.shape[dim], whole.shape[dim]
        if have != all_of_it and all_of_it % have == 0 and size % (all_of_it // have) == 0:
            place = rank * (all_of_it // have) // size  # key-value heads may be fewer than workers: then some share one
            return live, whole.narrow(dim, place * have, have)
    return live, whole


def _live(model: Any, layout: Layout) -> Iterator[Live]:
    """The published tensors in layout order, cut and padded as the engine does; rounded weights as [out, in].

    Raises Unreadable at the end when a parameter of the engine is in none of them: no flip would change it.
    """
    storages: set[int] = set()
    named = model.named_parameters(remove_duplicate=False)
    parameters = {name: held.t() if held.dtype == FP8 else held for name, held in named}  # vLLM's are [in, out]
    # vLLM's names of the stand-ins for what another pipeline stage has
    missing = [f"{name}." for name, module in model.named_modules() if type(module).__name__ == "PPMissingLayer"]
    for entry in layout.entries:
        found = _ELSEWHERE if entry.name.startswith((*missing,)) else parameters.get(entry.name)
        if found is None:
            found = _expert(model, parameters, entry)
        if found is _ELSEWHERE:
            continue
        if found is None:
            found = _part_of_fused(model, parameters, entry.name)
        scale = None
        if found.dtype == FP8:
            name = f"{entry.name}_scale"
            scale = parameters[name] if name in parameters else _part_of_fused(model, parameters, name)
            storages.add(scale.untyped_storage().data_ptr())
        storages.add(found.untyped_storage().data_ptr())
        yield Live(entry, _narrowed(found.data, getattr(torch, entry.dtype)), scale)
    for name, parameter in parameters.items():
        known = parameter.untyped_storage().data_ptr() in storages or _DERIVED.fullmatch(name)
        if parameter.numel() and not known:
            raise Unreadable(f"{name} of the engine was not published and stays as it was at the start")


def _narrowed(live: torch.Tensor, published: torch.dtype) -> torch.Tensor:
    """`live` in the published dtype where that loses no bit: vLLM keeps the routers of GLM in float32."""
    if live.element_size() <= published.itemsize:
        return live
    narrow = live.to(published)
    return narrow if torch.equal(narrow.to(live.dtype), live) else live


def _expert(model: Any, parameters: dict[str, torch.Tensor], entry: Entry) -> torch.Tensor | None:
    """The part of the stacked experts that one expert's projection was loaded into; None when it is no expert's.

    w13_weight is [experts, gate and up rows, hidden], either half padded at its end; w2_weight [experts, hidden,
    intermediate], padded in its last dimension.
    """
    match = _EXPERT.fullmatch(entry.name)
    if match is None:
        return None
    path = f"{match['experts']}.routed_experts"
    stacked = {name: parameters.get(f"{path}.{name}_{match['kind']}") for name in ("w13", "w2")}
    if stacked["w13"] is None or stacked["w2"] is None:
        return None
    routed = model.get_submodule(path)
    number = int(match["number"])
    numbers = getattr(routed, "_expert_map", None)  # only under expert parallelism; -1: another worker has this expert
    if numbers is not None and number < len(numbers):
        number = int(numbers[number])
        if number < 0:
            return _ELSEWHERE
    if number >= len(stacked["w2"]):
        return None
    if match["projection"] == routed.ckpt_down_proj_name:
        return stacked["w2"][number, :, : entry.shape[-1]]
    half = stacked["w13"].shape[1] // 2
    starts = {routed.ckpt_gate_proj_name: 0, routed.ckpt_up_proj_name: half}
    start = starts.get(match["projection"])
    return None if start is None else stacked["w13"][number, start : start + min(half, entry.shape[0])]


def _part_of_fused(model: Any, parameters: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The rows of a fused projection that `name` (…q_proj.weight) was loaded into."""
    prefix, _, kind = name.rpartition(".")
    parent, _, leaf = prefix.rpartition(".")
    for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
        target = f"{parent}.{fused}.{kind}"
        if leaf in parts and target in parameters:
            sizes = model.get_submodule(f"{parent}.{fused}").output_partition_sizes
            start = sum(sizes[: parts.index(leaf)])
            return parameters[target][start : start + sizes[parts.index(leaf)]]
    raise Unreadable(f"{name} was published, but the engine has no parameter for it")
