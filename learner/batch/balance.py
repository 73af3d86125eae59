"""Documents of given sizes dealt to ranks and microbatches. It needs no torch, so `slipstream plan` asks it too.

Work is balanced by what a document of p places costs a transformer of hidden size h,

    cost(p) = p + p^2 / (12 h)

in units of one token's matrix products. Those take 24 h^2 floating-point operations per layer and token, and causal
attention 2 p h (Kaplan et al. 2020, arXiv 2001.08361, section 2.1). The square only matters for p near 12 h.
"""

import heapq

import numpy as np

Plan = list[list[list[int]]]  # [rank][microbatch] -> document numbers
EVEN = 0.01  # ranks are even enough when the most loaded one is this share over the mean
MOST_PAIRS = 1 << 18  # looked at for one exchange, so that it takes milliseconds and not gigabytes


def counted_places(places: np.ndarray, multiple: int) -> np.ndarray:
    """Places of documents in a microbatch: [n] int64, rounded up to `multiple`."""
    return -(-places // multiple) * multiple


def cost(places: np.ndarray, hidden_size: int) -> np.ndarray:
    """Work of documents of `places`, in tokens: [n] float64. Without a hidden size attention counts for nothing."""
    linear = places.astype(np.float64)
    return linear + linear**2 / (12 * hidden_size) if hidden_size else linear


def balance(places: np.ndarray, ranks: int, micro_batch_tokens: int, hidden_size: int = 0) -> Plan:
    """Deal documents to `ranks` data-parallel ranks and as few microbatches as fit. Deterministic.

    The longest document goes first, into the cheapest microbatch with room (Graham's LPT rule). There are more
    microbatches when none has room. They are dealt out so that the ranks' totals are close. Then ranks trade documents
    until the most loaded one is within EVEN of the mean, or no trade helps. Unless the bound turns a document away from
    the cheapest microbatch, ranks differ by no more than the most expensive document. With fewer documents than
    microbatches some are empty. No document of `places` ([n] int64) has more than `micro_batch_tokens`, the bound of a
    microbatch.
    """
    order = np.lexsort((np.arange(len(places)), -places)).tolist()
    sizes = places.tolist()
    costs = cost(places, hidden_size).tolist()
    crowded = int((places * 2 > micro_batch_tokens).sum())  # no two of these share a microbatch
    count = max(1, -(-int(places.sum()) // (ranks * micro_batch_tokens)), -(-crowded // ranks))
    while (bins := _fill(order, sizes, costs, ranks * count, micro_batch_tokens)) is None:
        count = max(count + 1, count * 21 // 20)
    dealt = _deal(bins, costs, ranks)
    return _exchange(dealt, places, np.array(costs), micro_batch_tokens) if ranks > 1 and sizes else dealt


def balance_at_home(
    places: np.ndarray, homes: np.ndarray, ranks: int, micro_batch_tokens: int, hidden_size: int = 0
) -> Plan:
    """As `balance`, with every document on its rank in `homes` ([n] int64). Ranks with less have empty microbatches."""
    plan: Plan = []
    for rank in range(ranks):
        own = np.flatnonzero(homes == rank)
        (bins,) = balance(places[own], 1, micro_batch_tokens, hidden_size)
        plan.append([own[numbers].tolist() for numbers in bins])
    most = max(map(len, plan))
    return [bins + [[] for _ in range(most - len(bins))] for bins in plan]


def homes_of_groups(costs: np.ndarray, groups: np.ndarray, ranks: int) -> np.ndarray:
    """Ranks of documents ([n] int64) that spread every group over all ranks: any part of whole groups is about even.

    A document goes to the rank with the least of its group, among equals to the one with the least of all. The most
    expensive one goes first. `costs`: [n] float64, `groups`: [n] int64.
    """
    homes = np.zeros(len(costs), dtype=np.int64)
    loads = [0.0] * ranks
    worth: list[float] = costs.tolist()
    for group in np.unique(groups).tolist():
        inside = [0.0] * ranks
        own = np.flatnonzero(groups == group)
        for document in own[np.argsort(-costs[own], kind="stable")].tolist():
            rank = min(range(ranks), key=lambda r: (inside[r], loads[r], r))
            homes[document] = rank
            inside[rank] += worth[document]
            loads[rank] += worth[document]
    return homes


def _fill(order: list[int], sizes: list[int], costs: list[float], count: int, bound: int) -> list[list[int]] | None:
    """Place documents in `order` into `count` bins, each into the cheapest with room; None when there is none."""
    bins: list[list[int]] = [[] for _ in range(count)]
    used = [0] * count
    heap = [(0.0, i) for i in range(count)]
    for document in order:
        full: list[tuple[float, int]] = []
        while heap and used[heap[0][1]] + sizes[document] > bound:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, i = heap[0]
        bins[i].append(document)
        used[i] += sizes[document]
        heapq.heapreplace(heap, (load + costs[document], i))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _deal(bins: list[list[int]], costs: list[float], ranks: int) -> Plan:
    """Most expensive bins first, one to each rank per round, the most expensive of a round to the least loaded rank.

    So microbatches that ranks compute at the same time are alike, and totals differ by no more than bins do.
    """
    weights = [sum(costs[d] for d in bin_) for bin_ in bins]
    by_load = sorted(range(len(bins)), key=lambda i: (-weights[i], i))
    dealt: Plan = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for lap in range(0, len(bins), ranks):
        seats = sorted(range(ranks), key=lambda rank: (loads[rank], rank))
        for rank, i in zip(seats, by_load[lap : lap + ranks], strict=True):
            dealt[rank].append(sorted(bins[i]))
            loads[rank] += weights[i]
    return dealt


def _exchange(dealt: Plan, sizes: np.ndarray, costs: np.ndarray, bound: int) -> Plan:
    """Let the most loaded rank trade a document for a cheaper one, or for none, while that makes the worst rank better.

    Microbatches stay within the bound. It takes the pair after which the worse of the two ranks is best.
    """
    count = len(dealt[0])
    bins = [numbers for rank in dealt for numbers in rank]
    nothing = np.zeros(len(bins), dtype=np.int64)  # may be traded too: the free room of each microbatch
    size = np.concatenate([sizes, nothing])
    price = np.concatenate([costs, nothing])
    place = np.concatenate([np.zeros_like(sizes), np.arange(len(bins))])
    for i, numbers in enumerate(bins):
        place[numbers] = i
    used = np.bincount(place, size, len(bins)).astype(np.int64)
    load = np.bincount(place // count, price, len(dealt))
    goal = max(float(load.sum()) / len(dealt) * (1 + EVEN), float(costs.max()))
    while load[worst := int(load.argmax())] > goal:
        rank = place // count
        own = np.flatnonzero(rank[: len(sizes)] == worst)
        own = own[:: len(own) * len(size) // MOST_PAIRS + 1]
        cheaper = price[own, None] - price
        smaller = size[own, None] - size
        after = np.maximum(load[worst] - cheaper, load[rank] + cheaper)
        after[(used[place] + smaller > bound) | (used[place[own], None] - smaller > bound)] = np.inf
        after[:, rank == worst] = np.inf
        i, other = divmod(int(after.argmin()), len(size))
        given = int(own[i])
        if after[i, other] > load[worst] * (1 - 1e-6):
            break
        used[place[given]] -= smaller[i, other]
        used[place[other]] += smaller[i, other]
        load[worst] -= cheaper[i, other]
        load[rank[other]] += cheaper[i, other]
        place[[given, other]] = place[[other, given]]
    return _in_order(place[: len(sizes)].tolist(), costs.tolist(), len(dealt), count)


def _in_order(place: list[int], costs: list[float], ranks: int, count: int) -> Plan:
    """The plan whose document i is in microbatch `place[i]`; every rank computes its most expensive ones first."""
    bins: list[list[int]] = [[] for _ in range(ranks * count)]
    for document, i in enumerate(place):
        bins[i].append(document)
    weights = [sum(costs[d] for d in bin_) for bin_ in bins]
    return [
        [bins[i] for i in sorted(range(rank * count, (rank + 1) * count), key=lambda i: (-weights[i], i))]
        for rank in range(ranks)
    ]
