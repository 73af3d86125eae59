"""Reading Hugging Face tensors back out of fused, tied and padded parameters."""

import pytest
import torch
from torch import nn

from common.weights import packing
from common.weights.layout import Layout
from rollout_fleet import readback


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
    return layout, packing.pack(named, layout)


def test_what_the_parameters_hold_has_the_published_checksum() -> None:
    model = Model()
    layout, flat = published(model)
    assert readback.checksum(model, layout) == packing.checksum(flat)


@pytest.mark.parametrize("row", [0, 8, 11])
def test_one_changed_element_of_any_part_changes_it(row: int) -> None:
    model = Model()
    layout, flat = published(model)
    with torch.no_grad():
        model.attn.qkv_proj.weight[row, 3] += 1e-6
    assert readback.checksum(model, layout) != packing.checksum(flat)


def test_padded_rows_do_not_matter() -> None:
    model = Model()
    layout, flat = published(model)
    with torch.no_grad():
        model.embed.weight[50:] = float("nan")
    assert readback.checksum(model, layout) == packing.checksum(flat)


def test_a_tensor_without_a_parameter_is_named() -> None:
    layout = Layout.of([("attn.o_proj.weight", "float32", (4, 4))])
    with pytest.raises(readback.Unreadable, match=r"attn\.o_proj\.weight was published"):
        readback.checksum(Model(), layout)


def test_another_dtype_or_shape_is_no_proof() -> None:
    for entry in (("embed.weight", "bfloat16", (50, 4)), ("embed.weight", "float32", (65, 4))):
        with pytest.raises(readback.Unreadable, match=r"embed\.weight was published as"):
            readback.checksum(Model(), Layout.of([entry]))
