"""Every rank's part of a step: exactly its documents, as the lead rank packs them."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from broker.contract import StoredGroup
from common.errors import UsageError
from learner.backend_protocol import Microbatch
from learner.batch.packing import Document, build
from learner.batch.updates import Part
from learner.loop import rollout_source
from learner.loop.share import Cell, Told, cells, decode, encode, of_layers
from tests.unit.learner.loop_fakes import MakeWorld, World


def test_the_lead_decodes_a_group_once_and_every_rank_gets_its_own_documents(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[StoredGroup] = []
    decode = rollout_source.decode
    monkeypatch.setattr(rollout_source, "decode", lambda stored, **how: decoded.append(stored) or decode(stored, **how))
    world = make_world(run={"steps": 2})
    assert world.run() == "done"
    assert sorted(stored.serial for stored in decoded) == [0, 1, 2, 3]
    whole, (everything,) = world.lead.batch(1)
    sent, (ours, theirs) = shared(world)
    assert len(sent) == 1 and set(sent[0]) == {1}, "the lead makes nothing for itself"
    assert ours[0].statistics == theirs[0].statistics == whole.statistics
    assert theirs[0].documents == []
    parts = [batch for found in (ours, theirs) for update in found[1] for batch in update.microbatches]
    assert sorted(n for batch in parts for n in batch.numbers) == list(range(len(whole.documents)))
    for batch in parts:
        (alone,) = build(whole.documents, [list(batch.numbers)])
        for field in fields(Microbatch):
            found, expected = getattr(batch, field.name), getattr(alone, field.name)
            same = torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected
            assert same, field.name
    assert sum(len(batch.tokens) for batch in everything.microbatches) == sum(len(batch.tokens) for batch in parts)


def shared(world: World) -> tuple[list[dict[int, np.ndarray]], tuple[Any, Any]]:
    """The bytes that the lead of two ranks sends, and the batches of both."""
    sent: list[dict[int, np.ndarray]] = []
    lead: Any = world.lead
    backend: Any = world.backend
    backend.world_size = backend.data_parallel_size = 2
    backend.all_gather_bytes = lambda own: [own, msgspec.msgpack.encode(Cell(1, ()))]
    backend.deliver = lambda make, groups: sent.append({n: make(n) for n, ranks in enumerate(groups) if 0 not in ranks})
    lead._cells = cells(backend)
    other = rollout_source.RolloutSource(world.config)
    other.attach(backend, 1)

    def theirs() -> Any:
        backend.deliver = lambda make, groups: sent[0][1]
        return other.batch(1)

    try:
        ours = lead.batch(1)
    except Exception as error:
        with pytest.raises(UsageError) as found:
            theirs()
        assert str(found.value) == str(error)
        raise
    return sent, (ours, theirs())


def test_every_rank_refuses_a_step_that_the_lead_cannot_pack(make_world: MakeWorld) -> None:
    world = make_world(run={"steps": 1})
    assert world.run() == "done"
    learner = msgspec.structs.replace(world.config.learner, micro_batch_tokens=1)
    world.lead.config = msgspec.structs.replace(world.config, learner=learner)
    with pytest.raises(UsageError):
        shared(world)


def test_every_rank_refuses_a_step_whose_estimator_fails(
    make_world: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_parts.py").write_text("def fails(groups):\n    raise LookupError('no reward of this name')\n")
    monkeypatch.syspath_prepend(tmp_path)
    world = make_world(run={"steps": 1})
    assert world.run() == "done"
    loss = msgspec.structs.replace(world.config.learner.loss, advantage="failing_parts:fails")
    learner = msgspec.structs.replace(world.config.learner, loss=loss)
    world.lead.config = msgspec.structs.replace(world.config, learner=learner)
    with pytest.raises(LookupError, match="no reward of this name"):
        shared(world)


@pytest.mark.parametrize("age", [3, 127, 128, 70_000])
def test_a_document_arrives_as_it_was_with_the_routing_of_the_layers_of_its_rank(age: int) -> None:
    routing = np.arange(5 * 4 * 2, dtype=np.uint8).reshape(5, 4, 2)
    document = Document(
        tokens=np.arange(5, dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1, 1], np.uint8),
        behavior_logprobs=np.linspace(-3, 0, 5, dtype=np.float32),
        staleness=np.array([-1, 0, age, 0, 1], np.int32),
        advantage=0.1,
        serial=7,
        sample=1,
        routed_experts=routing,
        kl_coefficient=0.25,
        path=2,
    )
    plain = replace(document, routed_experts=None, staleness=None, serial=8)
    sent = {4: of_layers(document, (1, 3)), 9: plain}
    microbatches = [[9], [4], []]
    parts = [Part(0, 0, microbatches), Part(2, 1, [[4]])]
    told, found, arrived_parts = decode(encode(Told(canary=[1, 2]), sent, parts))
    assert (told.canary, arrived_parts, list(found)) == ([1, 2], parts, [4, 9])
    arrived = found[4].routed_experts
    assert arrived is not None and arrived.tolist() == routing[:, [1, 3]].tolist()
    neighbours = of_layers(document, (1, 2)).routed_experts
    assert neighbours is not None and neighbours.tolist() == routing[:, [1, 2]].tolist()
    for field in fields(Microbatch):
        for ours, theirs in zip(build(found, microbatches), build(sent, microbatches), strict=True):
            a, b = getattr(ours, field.name), getattr(theirs, field.name)
            assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b, field.name
    without = of_layers(document, ()).routed_experts
    assert without is not None and without.shape == (5, 0, 2), "a stage without routers"
