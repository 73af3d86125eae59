"""The parts that ranks export by themselves are together the whole export, to the bit, under every layout."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.rigs import forked_ranks, tiny_models
from tests.rigs.forked_ranks import Outcome, group, same

TP2, PP2, CP2, EP2, ETP2 = ({name: 2} for name in ("tensor", "pipeline", "context", "expert", "expert_tensor"))
VPP2, TP2_PP2_EP2 = PP2 | {"virtual_pipeline": 2}, TP2 | PP2 | EP2
BOTH = "tied-both"  # its file has the embeddings under both names

# (name, kind, ranks that send dense tensors, ranks that send experts, keys of the spec)
CASES: list[tuple[str, str, list[int], list[int], dict[str, Any]]] = [
    ("one", "moe", [0], [0], {}),
    ("dp2", "tied", [0], [], {"ranks": 2}),
    ("dp2-experts", "moe", [0], [0], {"ranks": 2}),
    ("cp2", "qwen2", [0], [], {"parallel": CP2}),
    ("tp2", "qwen2", [0], [], {"parallel": TP2}),
    ("pp2-both", BOTH, [0, 1], [], {"parallel": PP2}),
    ("pp2-uneven", "untied-deep", [0, 1], [], {"parallel": PP2 | {"last_stage_layers": 3}}),
    ("vpp2", "tied-deep", [0, 1], [], {"parallel": VPP2}),
    ("tp2-ep2", "moe", [0], [0, 1], {"parallel": TP2 | EP2}),
    ("ep2-etp2", "moe", [0], [0, 2], {"parallel": EP2 | ETP2, "ranks": 4}),
    ("ep2-dp4", "moe", [0], [0, 1], {"parallel": EP2, "ranks": 4}),
    ("vpp2-ep2", "moe-deep", [0, 2], [0, 1, 2, 3], {"parallel": VPP2 | EP2}),
    ("deepseek-tp2-pp2-ep2", "deepseek-v3-deep", [0, 2], [0, 1, 2, 3], {"parallel": TP2_PP2_EP2, "dtype": "bfloat16"}),
    ("glm-tp2-pp2-ep2", "glm", [0, 2], [2, 3], {"parallel": TP2_PP2_EP2}),
    ("offloaded", "moe", [0, 1], [0, 1], {"parallel": PP2, "memory": {"offload_parameters": True}}),
]
SPECS = [
    {"name": name, "kind": kind, "dense": dense, "experts": experts} | keys
    for name, kind, dense, experts, keys in CASES
]


def job_models(folder: Path, spec: dict[str, Any]) -> None:
    """FOLDER/models/KIND of every kind."""
    tiny_models.job_models(folder, {"kinds": sorted({kind for _, kind, *_ in CASES} - {BOTH})})
    tiny_models.save(tiny_models.new_model("tied"), folder / "models" / BOTH)
    file = folder / "models" / BOTH / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})


def job_parts(folder: Path, spec: dict[str, Any]) -> None:
    """Layout and part before any full export, then after an optimizer step, twice, and after a full export."""
    backend = tiny_models.backend(folder, spec)
    with only_gathers():
        layouts, first = [backend.part_layout()], part_of(backend)
    tiny_models.step(backend, 0)
    with only_gathers():
        parts = [part_of(backend), part_of(backend)]
    tensors = {f"part.{name}": tensor for name, tensor in parts[0].items()}
    whole = tiny_models.exported(backend, "whole")
    parts.append(part_of(backend))
    layouts.append(backend.part_layout())
    if spec.get("parallel", {}).keys() <= {"pipeline", "virtual_pipeline", "expert"}:  # no rank waits for another
        begun = backend.export_part()
        head = [(name, tensor.clone()) for name, tensor in islice(begun, 3)]
        again = tiny_models.exported(backend, "whole")
        parts.append(dict(head) | {name: tensor.clone() for name, tensor in begun})
    else:
        again = tiny_models.exported(backend, "whole")
    result = {
        "layouts": layouts,
        "orders": [list(part) for part in (first, *parts)],
        "moved": [name for name, tensor in first.items() if not torch.equal(tensor, parts[0][name])],
        "parts_repeat": [alike(part, parts[0]) for part in parts],
        "whole_repeats": alike(again, whole),
    }
    forked_ranks.write(folder / spec["name"], backend.rank, tensors | (whole if backend.rank == 0 else {}), result)


def part_of(backend: Any) -> dict[str, Tensor]:
    """The rank's part; no name may come twice."""
    named = [(name, tensor.clone()) for name, tensor in backend.export_part()]
    assert len({name for name, _ in named}) == len(named)
    return dict(named)


def alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


@contextmanager
def only_gathers() -> Iterator[None]:
    """Within, a rank that sends a tensor to ranks that do not need it, as the full export does, fails the test."""
    names = ("all_gather", "all_gather_object", "broadcast", "broadcast_object_list")
    with patch.multiple("torch.distributed", **{name: Mock(side_effect=AssertionError(name)) for name in names}):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parts and the whole under every layout."""
    return forked_ranks.run(tmp_path_factory, group(job_models, [{}]), group(job_parts, SPECS, shared=True))


each = forked_ranks.named(SPECS)


@each
def test_the_parts_are_together_the_whole_export_and_no_name_comes_twice(folder: Path, spec: dict[str, Any]) -> None:
    found = Outcome(folder / spec["name"])
    counts = Counter(name for rank in found.ranks for name in rank["orders"][0])
    assert set(counts.values()) == {1}
    same(found.section("part"), found.section("whole"))


@each
def test_only_sources_send_and_each_what_it_has(folder: Path, spec: dict[str, Any]) -> None:
    orders = [rank["orders"][0] for rank in Outcome(folder / spec["name"]).ranks]
    experts = [[name for name in order if ".mlp.experts." in name] for order in orders]
    dense = [set(order) - set(own) for order, own in zip(orders, experts, strict=True)]
    assert [rank for rank, own in enumerate(dense) if own] == spec["dense"]
    assert [rank for rank, own in enumerate(experts) if own] == spec["experts"]


@each
def test_the_layout_tells_what_the_part_yields_every_time(folder: Path, spec: dict[str, Any]) -> None:
    found = Outcome(folder / spec["name"])
    for rank, tensors in zip(found.ranks, found.tensors_of, strict=True):
        layout = [[name, list(tensors[f"part.{name}"].shape)] for name in rank["orders"][0]]
        assert rank["layouts"] == [layout, layout]
        assert rank["orders"] == [rank["orders"][0]] * len(rank["orders"])


@each
def test_neither_export_disturbs_the_other_and_both_see_the_last_step(folder: Path, spec: dict[str, Any]) -> None:
    for rank in Outcome(folder / spec["name"]).ranks:
        assert all(rank["parts_repeat"]) and rank["whole_repeats"]
        assert bool(rank["moved"]) == bool(rank["orders"][0])


def test_embeddings_that_are_tied_come_from_the_first_stage_under_both_names(folder: Path) -> None:
    names = {"lm_head.weight", "model.embed_tokens.weight"}
    sent = [names & set(rank["orders"][0]) for rank in Outcome(folder / "pp2-both").ranks]
    assert sent == [names, set()]
