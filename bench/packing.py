"""How full microbatches are and how evenly ranks are loaded: python bench/packing.py

Long-tailed lengths (log-normal, cut at the longest sequence) are packed for 2 to 16 data-parallel ranks. One
figure is real tokens over computed ones: pads of documents and packs, and fillers of empty microbatches. The other one
is the most loaded rank's cost over the mean, with tokens alone and with attention weighed. Nothing is timed. Writes
bench/results/packing.json.
"""

import json

import harness
import numpy as np

from common.config.parallel_layout import document_multiple
from common.config.schema import ParallelConfig
from learner.batch.packing import FILLER, Document, cost, counted_places, plan
from learner.megatron.pack_layout import pack_multiple

RANKS = (2, 4, 8, 16)
STEPS = 20
DOCUMENTS = 512  # in one step
HIDDEN = 1024
# name, median, spread of the logarithm, longest, micro_batch_tokens
WORKLOADS = (("answers", 350, 0.9, 4096, 16384), ("reasoning", 3000, 1.0, 32768, 65536))
LAYOUTS = {"dense": {}, "tp2_sp": {"tensor": 2}, "cp2": {"context": 2}, "tp4_sp_cp4": {"tensor": 4, "context": 4}}


def lengths(median: int, spread: float, longest: int, step: int) -> np.ndarray:
    """[DOCUMENTS] tokens of one step's documents."""
    draw = np.random.default_rng([median, step])
    return np.clip(np.exp(draw.normal(np.log(median), spread, DOCUMENTS)), 2, longest).astype(int)


def measure(workload: tuple[str, int, float, int, int], layout: str, ranks: int, weigh: bool) -> dict:
    """Means over the steps of one setting."""
    name, bound = workload[0], workload[4]
    parallel = ParallelConfig(**LAYOUTS[layout])
    multiple, whole = document_multiple(parallel), pack_multiple(parallel)
    hidden = HIDDEN if weigh else 0
    real = computed = 0
    imbalances = []
    for step in range(STEPS):
        documents = [Document(np.zeros(n, np.int32), np.ones(n, np.uint8)) for n in lengths(*workload[1:4], step)]
        places = np.array([document.places for document in documents])
        padded = counted_places(places, multiple)
        plans = plan(documents, ranks, bound, multiple, hidden)
        for numbers in (numbers for rank in plans for numbers in rank):
            taken = int(padded[numbers].sum()) if numbers else FILLER.places
            computed += -(-taken // whole) * whole
        real += int(places.sum())
        loads = [sum(cost(padded, HIDDEN)[i] for numbers in rank for i in numbers) for rank in plans]
        imbalances.append(max(loads) / (sum(loads) / ranks) - 1)
    return {
        "workload": name,
        "layout": layout,
        "data_parallel": ranks,
        "attention_weighed": weigh,
        "real_over_computed_tokens": round(real / computed, 5),
        "imbalance_mean": round(float(np.mean(imbalances)), 5),  # most loaded rank's cost over the mean, less one
    }


def main() -> None:
    options = harness.parser(__doc__).parse_args()
    rows = [
        measure(workload, layout, ranks, weigh)
        for workload in WORKLOADS
        for layout in LAYOUTS
        for ranks in RANKS
        for weigh in ((False, True) if layout == "dense" else (True,))
    ]
    for row in rows:
        print(json.dumps(row))
    setting = {"documents_per_step": DOCUMENTS, "steps": STEPS, "hidden_size": HIDDEN}
    workloads = [dict(zip(("name", "median", "spread", "longest", "bound"), w, strict=True)) for w in WORKLOADS]
    harness.save("packing", options, {"rounds": STEPS, "setting": setting, "workloads": workloads, "rows": rows})


if __name__ == "__main__":
    main()
