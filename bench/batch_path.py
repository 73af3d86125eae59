"""The cost of bringing a step's documents to the ranks: python bench/batch_path.py

Eight ranks over gloo on loopback, documents of 32k tokens, with and without the routing of experts. Both ways begin
with the groups at the lead rank and end with every rank's microbatches; nothing is trained:

- broadcast: every rank gets all groups, and decodes, checks, prepares and plans all of them (the former way)
- own: the lead rank does that once and sends every replica its documents (the learner's way). Decoding and preparing
  the groups is measured apart (`ahead_s`): the learner does it in a thread, while the step before trains

Seconds are of CPU, because eight ranks share the cores. The costs per token and byte give the
seconds outside training for a step of 2^30 tokens. It has 64 hosts, 512 ranks, 64 replicas and links of 100 Gbit/s.
Its training takes 250 s. Only the thread's work overlaps with it; what takes longer than the training counts.
"""

import gc
import os
import resource
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness

RANKS = 8
TOKENS = 32_768  # in a document
GROUPS, GROUP_SIZE = 4, 8
VOCABULARY, BOUND, HIDDEN = 32_000, 65_536, 4096
CASES = {  # pipeline stages; layers with experts, experts per token
    "tokens": {"stages": 1, "routing": None},
    "routing": {"stages": 1, "routing": (16, 8)},
    "routing, 2 stages": {"stages": 2, "routing": (16, 8)},
}
EXPERTS = 128
HOSTS, STEP_TOKENS, STEP_S, LINK_BYTES_S = 64, 1 << 30, 250.0, 12.5e9


def payload(serial: int, routing: tuple[int, int] | None) -> bytes:
    import numpy as np

    from common.rollouts import Group, Sample, VersionRun, encode_group
    from common.wire_types import Array

    draw = np.random.default_rng(serial)
    samples = []
    for number in range(GROUP_SIZE):
        experts = None
        if routing:
            rows = np.stack([draw.permutation(EXPERTS)[: routing[1]] for _ in range(256)])
            experts = Array.of(rows[draw.integers(0, 256, TOKENS * routing[0])].reshape(-1), "int16")
        mask = np.ones(TOKENS)
        mask[:1000] = 0
        samples.append(
            Sample(
                tokens=Array.of(draw.integers(0, VOCABULARY, TOKENS), "int32"),
                loss_mask=Array.of(mask, "uint8"),
                behavior_logprobs=Array.of(-draw.random(TOKENS), "float32"),
                version_runs=[VersionRun(1000, 3), VersionRun(TOKENS // 2, 4)],
                reward=float(number % 2),
                stop_reason="stop",
                routed_experts=experts,
            )
        )
    return encode_group(Group(serial, samples))


def rank_main(rank: int, case: dict[str, Any], way: str, rounds: int, pipe: Connection) -> None:
    """Rounds of one way on one rank; sends medians of its figures."""
    import msgspec
    import torch
    import torch.distributed as dist

    from broker.contract import StoredGroup
    from common.config.loading import load_either
    from common.process.lifecycle import keep_freed_memory
    from common.rollouts import GroupMeta
    from learner.backend_protocol import RoutingShape
    from learner.batch.batch import assemble, decode, prepare
    from learner.batch.packing import pack_for
    from learner.batch.updates import build_updates, numbers, plan_updates
    from learner.loop.share import Cell, Told, cells, encode, of_layers
    from learner.loop.share import decode as decode_share
    from learner.megatron import parallel

    torch.set_num_threads(1)
    keep_freed_memory()  # as the learner does
    dist.init_process_group("gloo")
    stages, routing = case["stages"], case["routing"]
    shape = RoutingShape(*routing, EXPERTS) if routing else None
    layers = tuple(range(routing[0])) if routing else ()
    own_layers = layers[rank % stages * len(layers) // stages : (rank % stages + 1) * len(layers) // stages]
    backend: Any = SimpleNamespace(
        data_parallel_rank=rank // stages, data_parallel_size=RANKS // stages, routing_layers=own_layers,
        document_multiple=1, hidden_size=HIDDEN, all_gather_bytes=parallel.gather,
    )  # fmt: skip
    config = load_either(Path("configs/quickstart.yaml"), [f"learner.micro_batch_tokens={BOUND}"]).rl
    meta = GroupMeta(3, 4, 0.5, GROUP_SIZE * TOKENS)
    stored = [StoredGroup(n, "node", meta, payload(n, routing)) for n in range(GROUPS)] if rank == 0 else []
    told: list[Cell] = cells(backend)

    def broadcast() -> tuple[Any, int, dict[str, float]]:
        sent = parallel.broadcast_bytes(msgspec.msgpack.encode(stored) if rank == 0 else None)
        size = len(sent)
        taken = msgspec.msgpack.decode(sent, type=list[StoredGroup]) if rank else stored
        del sent
        groups = [decode(group, VOCABULARY, GROUP_SIZE, shape) for group in taken]
        batch = assemble(groups, 5, config, shape)
        return (groups, batch, pack_for(backend, batch.documents, BOUND)), size, {}

    def own() -> tuple[Any, int, dict[str, float]]:
        spent: dict[str, float] = {}
        if rank:
            data = parallel.deliver(None, [cell.ranks for cell in told])
            began = time.process_time()
            _, documents, parts = decode_share(data)
            packed = build_updates(documents, parts, config)
            return (data, packed), len(data), {"build_s": time.process_time() - began}
        began = time.process_time()
        groups = [decode(group, VOCABULARY, GROUP_SIZE, shape) for group in stored]
        ahead = {group.serial: prepare(group, 5, config.sources, shape) for group in groups}
        spent["ahead_s"] = time.process_time() - began
        began = time.process_time()
        batch = assemble(groups, 5, config, shape, ahead)
        plans = plan_updates(backend, batch.documents, config, 5)
        spent["prepare_s"] = time.process_time() - began

        def part(number: int) -> Any:
            cell = told[number]
            chosen = {n: of_layers(batch.documents[n], cell.layers) for n in numbers(plans[cell.replica])}
            return encode(Told(batch.statistics), chosen, plans[cell.replica])

        began = time.process_time()
        parallel.deliver(part, [cell.ranks for cell in told])
        spent["deliver_s"] = time.process_time() - began
        mine = plans[backend.data_parallel_rank]
        packed = build_updates({n: of_layers(batch.documents[n], own_layers) for n in numbers(mine)}, mine, config)
        return (groups, batch, packed), 0, spent

    found = []
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(rounds):
        dist.barrier()
        began = time.process_time()
        kept, size, spent = (broadcast if way == "broadcast" else own)()
        spent |= {"cpu_s": time.process_time() - began, "received_bytes": size}
        found.append(spent)
        dist.barrier()
        del kept
        gc.collect()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base
    medians = {name: statistics.median(one[name] for one in found) for name in found[0]}
    pipe.send(medians | {"peak_mib": round(peak / 1024, 1)})
    dist.barrier()
    os._exit(0)


def measure(name: str, way: str, rounds: int) -> dict[str, Any]:
    ranks = harness.world(rank_main, RANKS, CASES[name], way, rounds)
    others = ranks[1:]
    row = {
        "case": name,
        "way": way,
        "lead_cpu_s": ranks[0]["cpu_s"],
        "other_cpu_s": max(rank["cpu_s"] for rank in others),
        "received_mib": max(rank["received_bytes"] for rank in others) / 2**20,
        "sent_by_lead_mib": sum(rank["received_bytes"] for rank in others) / 2**20,
        "lead_peak_mib": ranks[0]["peak_mib"],
        "other_peak_mib": max(rank["peak_mib"] for rank in others),
    }
    row |= {f"lead_{n}": ranks[0][n] for n in ("ahead_s", "prepare_s", "deliver_s") if n in ranks[0]}
    row |= {"other_build_s": max(rank["build_s"] for rank in others)} if "build_s" in others[0] else {}
    print(row, flush=True)
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}


def at_scale(broadcast: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a step of 64 hosts: CPU of the busiest rank, or the link where that is slower; `own_s` is outside
    training."""
    tokens = GROUPS * GROUP_SIZE * TOKENS
    more = STEP_TOKENS / tokens
    per_replica = more * RANKS / HOSTS  # times the tokens of a rank here
    sent = own["sent_by_lead_mib"] * 2**20 * RANKS / (RANKS - 1)  # the lead's own replica counts among its peers too
    link_s = sent * more / LINK_BYTES_S
    figures = {
        "broadcast_s": broadcast["other_cpu_s"] * more,
        "ahead_s": own["lead_ahead_s"] * more,
        "prepare_s": own["lead_prepare_s"] * more,
        "deliver_s": max(own["lead_deliver_s"] * more, link_s),
        "build_s": own["other_build_s"] * per_replica,
    }
    stays_s = figures["prepare_s"] + figures["deliver_s"] + figures["build_s"]
    figures["before_s"] = figures["ahead_s"] + stays_s  # without the thread
    figures["own_s"] = max(0.0, figures["ahead_s"] - STEP_S) + stays_s
    figures["own_share_of_step"] = 100 * figures["own_s"] / STEP_S
    return {"case": own["case"]} | {name: round(value, 2) for name, value in figures.items()}


@harness.script(rounds=3)
def main(options: harness.Options) -> harness.Figures:
    import learner.megatron.parallel  # noqa: F401  (once, before the ranks are forked)

    rows = [measure(name, way, options.rounds) for name in CASES for way in ("broadcast", "own")]
    scale = [at_scale(old, new) for old, new in zip(rows[::2], rows[1::2], strict=True)]
    return {"rounds": options.rounds, "tokens": GROUPS * GROUP_SIZE * TOKENS, "rows": rows, "hosts": scale}
