"""A publish of adapters beside one of whole versions: python bench/weight_adapters.py [--hidden 512] [--layers 8].

Real publisher, control sockets, transport and node processes on this machine; only the engine is a buffer. The model
has Qwen3's matrices with grouped queries and without embeddings, in bfloat16. Every linear layer has an adapter. Both
ways take turns. `bytes` is what a node receives, `call_s` the `publish` call, for which the training loop waits.
`active_s` is the time from the call until the node runs the version. `merge_s` is the node's merge alone, on one core.
On a link below `pays_below_mb_per_s` adapters save more time than the merge takes.

Short mode: --hidden 64 --layers 2 --rounds 1.
"""

import contextlib
import statistics
from typing import Any

import harness
import torch
from harness import timed

from common.weights.wire import flat_buffer
from common.weights.wire.adapters import merge, merge_version, names
from common.weights.wire.layout import AdapterLayout, Layout
from tests.rigs.waiting import until
from tests.rigs.weight_plane import Plane

FACTOR = 2.0
Named = list[tuple[str, torch.Tensor]]


def frozen(hidden: int, layers: int) -> Named:
    shapes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden // 4, hidden),
        "self_attn.v_proj": (hidden // 4, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (3 * hidden, hidden), "mlp.up_proj": (3 * hidden, hidden),
        "mlp.down_proj": (hidden, 3 * hidden),
    }  # fmt: skip
    named = [(f"model.layers.{i}.{name}.weight", shape) for i in range(layers) for name, shape in shapes.items()]
    return [(name, (0.02 * torch.randn(shape)).bfloat16()) for name, shape in named]


def adapters(weights: Named, rank: int) -> Named:
    made = Named()
    for name, weight in weights:
        a, b = names(name)
        rows, columns = weight.shape
        made += [(a, torch.randn(rank, columns).bfloat16()), (b, (1e-3 * torch.randn(rows, rank)).bfloat16())]
    return made


def merged(weights: Named, beside: Named) -> Named:
    found = dict(beside)
    return [(name, merge(weight, *(found[part] for part in names(name)), FACTOR)) for name, weight in weights]


def packed(named: Named) -> tuple[Layout, torch.Tensor]:
    layout = Layout.of([(name, "bfloat16", tuple(tensor.shape)) for name, tensor in named])
    return layout, flat_buffer.pack(named, layout)


def merge_s(weights: Named, beside: Named) -> float:
    (layout, flat), (told, found) = packed(weights), packed(beside)
    return timed(lambda: merge_version(flat, layout, found, AdapterLayout(told, FACTOR), flat.clone()))[1]


def measured(weights: Named, rank: int, transport: str, rounds: int) -> dict[str, Any]:
    """Medians of both ways for adapters of one rank."""
    versions = [adapters(weights, rank) for _ in range(rounds + 1)]
    whole = [merged(weights, version) for version in versions]
    found: dict[str, list[dict[str, float]]] = {"full": [], "adapter": []}
    with contextlib.closing(Plane()) as plane:
        fleets = {}
        for encoding in found:
            ours = plane.publisher(encoding=encoding, dtype="bfloat16", transport=transport, bucket_bytes=8 << 20)
            if encoding == "adapter":
                ours.freeze(weights, FACTOR)
            address = ours.start()
            fleets[encoding] = ours, plane.following(address, encoding)[0]
            until(lambda: ours.stats().nodes == 1, every_s=0.002)  # noqa: B023
        for number, (beside, version) in enumerate(zip(versions, whole, strict=True)):
            for encoding in list(found)[:: 1 if number % 2 else -1]:
                ours, node = fleets[encoding]
                _, call_s = timed(lambda: ours.publish(number, version, None, beside))  # noqa: B023
                node.wait("active", version=number)
                until(lambda: ours.stats().version_active == number, every_s=0.002)  # noqa: B023
                now = ours.stats()
                found[encoding].append(
                    {"call_s": call_s, "active_s": now.seconds_to_active, "bytes": now.publish_bytes}
                )
    row: dict[str, Any] = {"rank": rank, "transport": transport}
    for encoding, all_rounds in found.items():  # the first one brings frozen weights, and allocates
        row[encoding] = harness.medians(all_rounds[1:], 4)
    row["times_fewer_bytes"] = round(row["full"]["bytes"] / row["adapter"]["bytes"], 1)
    row["merge_s"] = round(statistics.median(merge_s(weights, beside) for beside in versions), 4)
    saved = row["full"]["bytes"] - row["adapter"]["bytes"]
    row["pays_below_mb_per_s"] = round(saved / row["merge_s"] / 1e6)
    print(row, flush=True)
    return row


@harness.script(hidden=512, layers=8, ranks=[8, 32], transports=["gloo", "relay"], rounds=5)
def main(options: harness.Options) -> harness.Figures:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weights = frozen(options.hidden, options.layers)
    cases = [(rank, transport) for rank in options.ranks for transport in options.transports]
    return {"rounds": options.rounds, "rows": [measured(weights, *case, options.rounds) for case in cases]}
