"""How full microbatches are and how evenly ranks are loaded: python bench/packing.py

Long-tailed lengths (log-normal, cut at the longest sequence) are packed for data-parallel ranks, 16 documents a rank.
Fullness is real tokens over computed ones: pads of documents and packs, and fillers of empty microbatches. Imbalance is
the most loaded rank's cost over the mean, less one; *before* is that of the same documents before ranks trade any.
"""

import time
from typing import Any

import harness
import numpy as np

from common.config.parallel_layout import document_multiple
from common.config.schema import ParallelConfig
from learner.batch import balance
from learner.batch.packing import FILLER, Document, plan
from learner.megatron.pack_layout import pack_multiple

RANKS = (2, 16, 32, 64, 128)
STEPS = 10
PER_RANK = 16  # documents
HIDDEN = 1024
WORKLOADS: tuple[dict[str, Any], ...] = (  # `spread` of the logarithm; `bound`: micro_batch_tokens
    {"name": "answers", "median": 350, "spread": 0.9, "longest": 4096, "bound": 16384},
    {"name": "reasoning, 32k", "median": 3000, "spread": 1.0, "longest": 32768, "bound": 32768},
    {"name": "reasoning, 64k", "median": 3000, "spread": 1.0, "longest": 32768, "bound": 65536},
    {"name": "long reasoning, 32k", "median": 8000, "spread": 0.8, "longest": 32768, "bound": 32768},
)
LAYOUTS = {"dense": {}, "tp2_sp": {"tensor": 2}, "cp2": {"context": 2}, "tp4_sp_cp4": {"tensor": 4, "context": 4}}


def documents(workload: dict[str, Any], step: int, ranks: int) -> list[Document]:
    draw = np.random.default_rng([workload["median"], step])
    logarithms = draw.normal(np.log(workload["median"]), workload["spread"], PER_RANK * ranks)
    lengths = np.clip(np.exp(logarithms), 2, workload["longest"]).astype(int)
    return [Document(np.zeros(n, np.int32), np.ones(n, np.uint8)) for n in lengths]


def imbalance(plans: balance.Plan, costs: np.ndarray) -> float:
    loads = [sum(costs[i] for numbers in rank for i in numbers) for rank in plans]
    return max(loads) / (sum(loads) / len(plans)) - 1


def measure(workload: dict[str, Any], layout: str, ranks: int) -> dict:
    """Means over the steps of one setting."""
    parallel = ParallelConfig(**LAYOUTS[layout])
    multiple, whole = document_multiple(parallel), pack_multiple(parallel)
    real = computed = microbatches = 0
    before, after, planned_ms = list[float](), list[float](), list[float]()
    even = balance.EVEN
    for step in range(STEPS):
        given = documents(workload, step, ranks)
        places = np.array([document.places for document in given])
        padded = balance.counted_places(places, multiple)
        costs = balance.cost(padded, HIDDEN)
        balance.EVEN = float("inf")
        before.append(imbalance(plan(given, ranks, workload["bound"], multiple, HIDDEN), costs))
        balance.EVEN = even
        began = time.process_time()
        plans = plan(given, ranks, workload["bound"], multiple, HIDDEN)
        planned_ms.append(1000 * (time.process_time() - began))
        after.append(imbalance(plans, costs))
        microbatches += len(plans[0])
        for numbers in (numbers for rank in plans for numbers in rank):
            taken = int(padded[numbers].sum()) if numbers else FILLER.places
            computed += -(-taken // whole) * whole
        real += int(places.sum())
    return {
        "workload": workload["name"],
        "layout": layout,
        "data_parallel": ranks,
        "documents": PER_RANK * ranks,
        "microbatches": microbatches / STEPS,
        "real_over_computed_tokens": round(real / computed, 5),
        "imbalance_before_mean": round(float(np.mean(before)), 5),
        "imbalance_mean": round(float(np.mean(after)), 5),
        "imbalance_most": round(max(after), 5),
        "plan_cpu_ms": round(float(np.median(planned_ms)), 1),
    }


@harness.script()
def main(options: harness.Options) -> harness.Figures:
    rows = [
        measure(workload, layout, ranks)
        for workload in WORKLOADS
        for layout in (LAYOUTS if workload["name"].endswith("64k") else ("dense",))
        for ranks in RANKS
    ]
    return {"rounds": STEPS, "hidden_size": HIDDEN, "workloads": WORKLOADS, "rows": rows}
