"""How full microbatches are and how evenly ranks are loaded: python bench/packing.py

Long-tailed lengths (log-normal, cut at the longest sequence) are packed for 2 to 16 data-parallel ranks. One
figure is real tokens over computed ones: pads of documents and packs, and fillers of empty microbatches. The other one
is the most loaded rank's cost over the mean, with tokens alone and with attention weighed. Nothing is timed.
"""

from typing import Any

import harness
import numpy as np

from common.config.parallel_layout import document_multiple
from common.config.schema import ParallelConfig
from learner.batch.balance import cost, counted_places
from learner.batch.packing import FILLER, Document, plan
from learner.megatron.pack_layout import pack_multiple

RANKS = (2, 4, 8, 16)
STEPS = 20
DOCUMENTS = 512  # in one step
HIDDEN = 1024
WORKLOADS: tuple[dict[str, Any], ...] = (  # `spread` of the logarithm; `bound`: micro_batch_tokens
    {"name": "answers", "median": 350, "spread": 0.9, "longest": 4096, "bound": 16384},
    {"name": "reasoning", "median": 3000, "spread": 1.0, "longest": 32768, "bound": 65536},
)
LAYOUTS = {"dense": {}, "tp2_sp": {"tensor": 2}, "cp2": {"context": 2}, "tp4_sp_cp4": {"tensor": 4, "context": 4}}


def lengths(workload: dict[str, Any], step: int) -> np.ndarray:
    """[DOCUMENTS] tokens of one step's documents."""
    draw = np.random.default_rng([workload["median"], step])
    logarithms = draw.normal(np.log(workload["median"]), workload["spread"], DOCUMENTS)
    return np.clip(np.exp(logarithms), 2, workload["longest"]).astype(int)


def measure(workload: dict[str, Any], layout: str, ranks: int, weigh: bool) -> dict:
    """Means over the steps of one setting."""
    parallel = ParallelConfig(**LAYOUTS[layout])
    multiple, whole = document_multiple(parallel), pack_multiple(parallel)
    hidden = HIDDEN if weigh else 0
    real = computed = 0
    imbalances = []
    for step in range(STEPS):
        documents = [Document(np.zeros(n, np.int32), np.ones(n, np.uint8)) for n in lengths(workload, step)]
        places = np.array([document.places for document in documents])
        padded = counted_places(places, multiple)
        plans = plan(documents, ranks, workload["bound"], multiple, hidden)
        for numbers in (numbers for rank in plans for numbers in rank):
            taken = int(padded[numbers].sum()) if numbers else FILLER.places
            computed += -(-taken // whole) * whole
        real += int(places.sum())
        loads = [sum(cost(padded, HIDDEN)[i] for numbers in rank for i in numbers) for rank in plans]
        imbalances.append(max(loads) / (sum(loads) / ranks) - 1)
    return {
        "workload": workload["name"],
        "layout": layout,
        "data_parallel": ranks,
        "attention_weighed": weigh,
        "real_over_computed_tokens": round(real / computed, 5),
        "imbalance_mean": round(float(np.mean(imbalances)), 5),  # most loaded rank's cost over the mean, less one
    }


@harness.script()
def main(options: harness.Options) -> harness.Figures:
    rows = [
        measure(workload, layout, ranks, weigh)
        for workload in WORKLOADS
        for layout in LAYOUTS
        for ranks in RANKS
        for weigh in ((False, True) if layout == "dense" else (True,))
    ]
    return {"rounds": STEPS, "rows": rows}
