"""Reading Hugging Face tensors back out of fused, tied and padded parameters."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from common.weights.wire import flat_buffer
from common.weights.wire.layout import WORDS, XXH3, Layout
from rollout_fleet.weights import weight_proof
from tests.rigs import device
from tests.rigs.device import OnDevice, Stream
from tests.rigs.refusals import refused


class Fused(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.output_partition_sizes = list(sizes)
        self.weight = nn.Parameter(torch.randn(sum(sizes), 4))


class Model(nn.Module):
    """The parameter names and shapes that an engine gives a small model."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 4)  # 50 rows are real
        self.attn = nn.Module()
        self.attn.qkv_proj = Fused(8, 2, 2)
        self.lm_head = nn.Module()
        self.lm_head.weight = self.embed.weight


PUBLISHED = [
    ("embed.weight", (50, 4)), ("attn.q_proj.weight", (8, 4)), ("attn.k_proj.weight", (2, 4)),
    ("attn.v_proj.weight", (2, 4)), ("lm_head.weight", (50, 4)),
]  # fmt: skip


def published(model: Model) -> tuple[Layout, torch.Tensor]:
    q, k, v = model.attn.qkv_proj.weight.data.split([8, 2, 2])
    embedding = model.embed.weight.data[:50]
    layout = Layout.of([(name, "float32", shape) for name, shape in PUBLISHED])
    named = zip([name for name, _ in PUBLISHED], [embedding, q, k, v, embedding], strict=True)
    return layout, flat_buffer.pack(named, layout)


class Experts(nn.Module):
    """Stacked experts as an engine has them: 3 of hidden size 4 and intermediate size 5, padded to 6."""

    ckpt_gate_proj_name, ckpt_up_proj_name, ckpt_down_proj_name = "w1", "w3", "w2"

    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.randn(3, 12, 4))
        self.w2_weight = nn.Parameter(torch.randn(3, 4, 6))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.routed_experts = Experts()


def published_experts(model: Sparse) -> tuple[Layout, torch.Tensor]:
    stacked = model.experts.routed_experts
    named: list[tuple[str, torch.Tensor]] = []
    for i in range(3):
        gate, up = stacked.w13_weight.data[i, :5], stacked.w13_weight.data[i, 6:11]
        down = stacked.w2_weight.data[i, :, :5]
        named += [(f"experts.{i}.{n}.weight", t) for n, t in (("w1", gate), ("w2", down), ("w3", up))]
    layout = Layout.of([(name, "float32", tuple(tensor.shape)) for name, tensor in named])
    return layout, flat_buffer.pack([(n, t.contiguous()) for n, t in named], layout)


W13, W2 = "experts.routed_experts.w13_weight", "experts.routed_experts.w2_weight"
CASES: dict[str, tuple[Any, ...]] = {  # model, what it publishes, its padding, elements of each published part
    "fused": (
        Model, published, [("embed.weight", slice(50, None))], [("attn.qkv_proj.weight", (n, 3)) for n in (0, 8, 11)],
    ),
    "experts": (
        Sparse, published_experts, [(W13, (slice(None), [5, 11])), (W2, (slice(None), slice(None), 5))],
        [(W13, (1, 0, 0)), (W13, (2, 10, 3)), (W2, (0, 3, 4))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("checksums", [XXH3, WORDS])
@pytest.mark.parametrize(("make", "publish", "padding", "elements"), CASES.values(), ids=CASES)
def test_parameters_have_the_published_checksum_which_any_element_changes_but_padding_does_not(
    make: Any, publish: Any, padding: list[tuple[str, Any]], elements: list[tuple[str, tuple[int, ...]]], checksums: str
) -> None:
    model = make()
    layout, flat = publish(model)
    layout = msgspec.structs.replace(layout, checksums=checksums)
    published = flat_buffer.checksum(flat, checksums)
    assert weight_proof.checksum(model, layout) == published
    for name, place in padding:
        model.get_parameter(name).data[place] = float("nan")
    assert weight_proof.checksum(model, layout) == published
    for name, place in elements:
        weight = model.get_parameter(name).data
        before = weight[place].item()
        weight[place] += 1e-6
        assert weight_proof.checksum(model, layout) != published, (name, place)
        weight[place] = before


@pytest.mark.parametrize(
    ("model", "name", "dtype", "shape", "absent"),
    [
        (Model, "attn.o_proj.weight", "float32", (4, 4), True),
        (Model, "embed.weight", "bfloat16", (50, 4), False),
        (Model, "embed.weight", "float32", (65, 4), False),
        (Sparse, "experts.0.w1.weight", "float32", (7, 4), False),
        (Sparse, "experts.3.w2.weight", "float32", (4, 5), True),
    ],
)
def test_a_tensor_without_a_parameter_of_its_dtype_and_shape_is_named(
    model: type[nn.Module], name: str, dtype: str, shape: tuple[int, ...], absent: bool
) -> None:
    with refused(weight_proof.Unreadable, name) as caught:
        weight_proof.checksum(model(), Layout.of([(name, dtype, shape)]))
    assert (f"{dtype} {shape}" in str(caught.value)) != absent


@pytest.mark.parametrize("checksums", [XXH3, WORDS])
def test_a_parameter_that_the_engine_has_in_a_wider_dtype_is_proven_with_its_lower_bits(checksums: str) -> None:
    gate = torch.randn(8, 4).bfloat16()
    model: Any = nn.Module()
    model.gate = nn.Linear(4, 8, bias=False)  # float32, as vLLM has the routers of GLM
    model.gate.weight.data.copy_(gate)
    layout = msgspec.structs.replace(Layout.of([("gate.weight", "bfloat16", (8, 4))]), checksums=checksums)
    flat = flat_buffer.pack([("gate.weight", gate)], layout)
    assert weight_proof.checksum(model, layout) == flat_buffer.checksum(flat, checksums)
    weight_proof.check_shard(model, layout, flat, 0, 2)
    model.gate.weight.data[3, 2] += 1e-6
    with refused(weight_proof.Unreadable, "gate.weight", "bfloat16", "float32"):
        weight_proof.checksum(model, layout)


def test_a_parameter_that_no_published_tensor_changes_is_named_unless_it_is_computed_from_others() -> None:
    model = Model()
    layout, flat = published(model)
    model.attn.W_UK_T = nn.Parameter(torch.randn(2, 4))
    assert weight_proof.checksum(model, layout) == flat_buffer.checksum(flat, layout.checksums)
    model.lm_head.weight = nn.Parameter(torch.randn(64, 4))  # untied
    tied = msgspec.structs.replace(layout, entries=layout.entries[:-1])
    with refused(weight_proof.Unreadable, "lm_head.weight"):
        weight_proof.checksum(model, tied)


def shard(rank: int, size: int, whole: dict[str, torch.Tensor]) -> Model:
    """The shard of worker `rank` of `size`: heads and vocabulary cut, keys and values in two at most."""
    model = Model()
    kv = min(2, size)
    q_rows, kv_rows = 8 // size, 2 // kv
    model.attn.qkv_proj = Fused(q_rows, kv_rows, kv_rows)
    place = rank * kv // size
    parts = [whole["attn.q_proj.weight"][rank * q_rows :][:q_rows]]
    parts += [whole[f"attn.{n}_proj.weight"][place * kv_rows :][:kv_rows] for n in "kv"]
    model.attn.qkv_proj.weight.data = torch.cat(parts)
    rows = 64 // size
    start, end = min(50, rank * rows), min(50, (rank + 1) * rows)
    held = torch.randn(rows, 4)
    held[: end - start] = whole["embed.weight"][start:end]
    model.embed.weight.data = held
    indices: Any = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=end)
    model.embed.shard_indices = model.lm_head.shard_indices = indices
    return model


@pytest.mark.parametrize("size", [2, 4])
def test_every_worker_proves_its_shard_and_a_changed_bit_is_named_with_the_worker(size: int) -> None:
    layout, flat = published(Model())
    whole = dict(flat_buffer.view(flat, layout))
    for rank in range(size):
        model = shard(rank, size, whole)
        weight_proof.check_shard(model, layout, flat, rank, size)
        other = (rank + size // 2) % size
        with refused(weight_proof.Unreadable, f"worker {other} of {size}"):
            weight_proof.check_shard(model, layout, flat, other, size)
        with torch.no_grad():
            model.attn.qkv_proj.weight[-1, 0] *= -1
        with refused(weight_proof.Unreadable, f"worker {rank} of {size}", "attn.v_proj"):
            weight_proof.check_shard(model, layout, flat, rank, size)


class PPMissingLayer(nn.Identity):
    """Stands, as in vLLM, for what another pipeline stage has."""


def test_a_worker_proves_its_own_experts_and_the_layers_of_its_stage() -> None:
    whole = Sparse()
    layout, flat = published_experts(whole)
    worker, theirs = Sparse(), whole.experts.routed_experts
    ours = worker.experts.routed_experts
    ours.register_buffer("_expert_map", torch.tensor([-1, 0, 1]))
    ours.w13_weight, ours.w2_weight = (nn.Parameter(w.data[1:].clone()) for w in (theirs.w13_weight, theirs.w2_weight))
    weight_proof.check_shard(worker, layout, flat, 1, 2)
    ours.w2_weight.data[1, 0, 0] += 1e-6
    with refused(weight_proof.Unreadable, "worker 1 of 2", "experts.2.w2.weight"):
        weight_proof.check_shard(worker, layout, flat, 1, 2)
    worker.experts = PPMissingLayer()
    weight_proof.check_shard(worker, layout, flat, 0, 1)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("sources", [1, 3])
def test_the_workers_of_an_engine_read_each_part_once_and_their_proofs_are_of_the_whole_version(
    size: int, sources: int
) -> None:
    layout = Layout.of(*([(f"w{number}", "float32", (64 + number,))] for number in range(sources)))
    flat = torch.randint(256, (layout.total_bytes,), dtype=torch.uint8)
    published = flat_buffer.version_checksum(flat, layout)

    def proven() -> str:
        each = [weight_proof.part_checksums(flat, layout, rank, size) for rank in range(size)]
        assert sorted(number for parts in each for number in parts) == list(range(sources))
        return weight_proof.whole_checksum([weight_proof.Proof(0, 1, parts=parts) for parts in each])

    assert proven() == published
    for part in layout.parts:
        flat[part.start] += 1
        assert proven() != published
        flat[part.start] -= 1


SHAPES = [(3, 5, 7), (), (1,), (0, 4), (4, 0), (257,), (2, 33)]
TENSORS = {
    f"{dtype} {shape} {strides}": torch.randn(shape)
    .to(getattr(torch, dtype))
    .permute(tuple(range(len(shape)))[::strides])
    for dtype in ("float32", "bfloat16", "float16", "float8_e4m3fn")
    for shape in SHAPES
    for strides in (1, -1)
}


@pytest.fixture(params=["early", "late"])
def buffers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Those that were made. A piece is of 10 bytes; copies are made at once, or when the proof waits for them."""
    made: list[torch.Tensor] = []
    stream = Stream()
    stream.early = request.param == "early"
    monkeypatch.setattr(device, "STREAM", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where: stream)
    monkeypatch.setattr(flat_buffer, "pinned", lambda flat, where: made.append(flat) or flat)
    monkeypatch.setattr(weight_proof, "PIECE_BYTES", 10)
    weight_proof._bounce.cache_clear()
    yield made
    weight_proof._bounce.cache_clear()
    assert not stream.blocking


@pytest.mark.parametrize("kind", [torch.Tensor, OnDevice])
def test_pieces_are_the_bytes_of_any_tensor(kind: type[torch.Tensor], buffers: list[torch.Tensor]) -> None:
    for name, tensor in TENSORS.items():
        whole = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        found = b""
        for offset, piece in weight_proof._in_host([(64, tensor.as_subclass(kind))]):
            assert offset == 64 + len(found) and (len(piece) <= 10 or kind is torch.Tensor), name
            found += piece.numpy().tobytes()
        assert found == whole, name


def engine(named: dict[str, torch.Tensor]) -> Any:
    """An engine whose parameters are on a device."""
    held = [(name, tensor.as_subclass(OnDevice)) for name, tensor in named.items()]
    return SimpleNamespace(named_parameters=lambda remove_duplicate: held, named_modules=list)


def test_a_device_brings_its_parameters_through_two_buffers_that_are_made_once(buffers: list[torch.Tensor]) -> None:
    published = {name: tensor for name, tensor in TENSORS.items() if "float8" not in name and tensor.dim()}
    typed = [(name, str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in published.items()]
    layout = Layout.of(typed[:9], typed[9:])
    flat = flat_buffer.pack(published.items(), layout)
    for _ in range(2):
        assert weight_proof.checksum(engine(published), layout) == flat_buffer.version_checksum(flat, layout)
        weight_proof.check_shard(engine(published), layout, flat, 0, 2)
    assert len(buffers) == 2
    for place in (0, flat.numel() // 2 - 64, flat.numel() - 64):  # each an entry's first byte or a gap's
        flat[place] ^= 1
    assert weight_proof.checksum(engine(published), layout) != flat_buffer.version_checksum(flat, layout)
    with refused(weight_proof.Unreadable, "worker 0 of 2"):
        weight_proof.check_shard(engine(published), layout, flat, 0, 2)
