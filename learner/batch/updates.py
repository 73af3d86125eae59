"""The optimizer updates of a batch: which groups each one trains on, on which rank, and without which old tokens.

    documents --minibatches--> whole groups for every update of an epoch
              --plan_updates--> for each rank the Part of every update: microbatches of document numbers
              --build_updates--> Update, with the tensors of this rank

A batch makes one version, whatever the number of its updates. Update u of step s is number u = epoch * minibatches + i.
The order of groups follows from (seed, step, epoch), so a batch that is replayed is trained alike. The lead rank plans
for all. A document stays on one rank, its home, in all epochs. So what that rank finds out about it before the first
update, as its frozen log-probabilities, never travels.

A token of staleness d is at most d * updates + u updates older than update u. Versions have had fewer updates where
kl_stop ended their batches early.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import xxhash

from common.config.schema import Config
from common.rollouts import Group
from learner.backend_protocol import Backend, Microbatch
from learner.batch.balance import Plan, cost, homes_of_groups
from learner.batch.batch import cache_age
from learner.batch.packing import Document, build, plan_for


class Part(NamedTuple):
    """One rank's share of an update."""

    update: int  # its number; those without a token to train on are left out
    epoch: int
    microbatches: list[list[int]]  # numbers of documents


@dataclass(frozen=True)
class Update:
    """One optimizer update on one rank."""

    number: int
    epoch: int
    microbatches: list[Microbatch]


def minibatches(serials: Sequence[int], count: int, *, seed: int, step: int, epoch: int) -> list[list[int]]:
    """The documents of each of `count` parts, which have equally many whole groups, or one more. Deterministic.

    `serials`: the group of every document. A part is empty where there are fewer groups.
    """
    drawn = {serial: xxhash.xxh3_64_intdigest(f"{seed} {step} {epoch} {serial}".encode()) for serial in set(serials)}
    place = {serial: i % count for i, serial in enumerate(sorted(drawn, key=lambda n: (drawn[n], n)))}
    parts: list[list[int]] = [[] for _ in range(count)]
    for number, serial in enumerate(serials):
        parts[place[serial]].append(number)
    return parts


def plan_updates(backend: Backend, documents: Sequence[Document], config: Config, step: int) -> list[list[Part]]:
    """[rank][update] of the batch of `step`; no rank has an update if there is nothing to train on.

    With several epochs of several minibatches every group is spread over the ranks. Otherwise documents are dealt as
    the first update with them balances best. Ranks take turns with the largest share, because some passes compute the
    whole batch. Raises UsageError as packing.plan.
    """
    learner = config.learner
    serials = [document.serial for document in documents]
    costs = cost(np.array([document.places for document in documents], dtype=np.int64), backend.hidden_size)
    loads = [0.0] * backend.data_parallel_size
    homes: dict[int, int] = {}
    if learner.epochs > 1 and learner.minibatches > 1:
        spread = homes_of_groups(costs, np.array(serials, dtype=np.int64), backend.data_parallel_size)
        homes = dict(enumerate(spread.tolist()))
    plans: dict[tuple[int, ...], Plan] = {}
    found: list[list[Part]] = [[] for _ in range(backend.data_parallel_size)]
    for epoch in range(learner.epochs):
        order = {"seed": config.run.seed, "step": step, "epoch": epoch}
        for i, own in enumerate(minibatches(serials, learner.minibatches, **order)):
            update = epoch * learner.minibatches + i
            kept = tuple(n for n in own if _trains(documents[n], update, config))
            if not kept:
                continue
            if kept not in plans:
                plan = _plan(backend, documents, kept, learner.micro_batch_tokens, homes)
                plans[kept] = plan if kept[0] in homes else _in_turns(plan, costs, loads)
                homes |= {n: rank for rank, batches in enumerate(plans[kept]) for batch in batches for n in batch}
            for rank, microbatches in enumerate(plans[kept]):
                found[rank].append(Part(update, epoch, microbatches))
    return found


def _plan(
    backend: Backend, documents: Sequence[Document], kept: tuple[int, ...], bound: int, homes: Mapping[int, int]
) -> Plan:
    """Microbatches of the documents with the numbers `kept`, which are on their homes unless they have none yet."""
    known = kept[0] in homes
    at = np.array([homes[n] for n in kept], dtype=np.int64) if known else None
    plan = plan_for(backend, [documents[n] for n in kept], bound, at)
    return [[[kept[i] for i in batch] for batch in rank] for rank in plan]


def _in_turns(plan: Plan, costs: np.ndarray, loads: list[float]) -> Plan:
    """The shares of a plan on other ranks: the most expensive one on the rank whose load is the least. Adds to `loads`.

    Nothing changes while all loads are 0.
    """
    weights = [float(sum(costs[n] for batch in own for n in batch)) for own in plan]
    ranks = sorted(range(len(plan)), key=lambda rank: (loads[rank], -weights[rank], rank))
    turned: Plan = [[] for _ in plan]
    for rank, share in zip(ranks, sorted(range(len(plan)), key=lambda i: (-weights[i], i)), strict=True):
        turned[rank] = plan[share]
        loads[rank] += weights[share]
    return turned


def numbers(parts: Sequence[Part]) -> list[int]:
    """The documents of all updates, each once."""
    return list(dict.fromkeys(n for part in parts for batch in part.microbatches for n in batch))


def build_updates(documents: Mapping[int, Document], parts: Sequence[Part], config: Config) -> list[Update]:
    """Tensors of one rank's parts; `documents` are those of `numbers`."""
    return [
        Update(
            part.update,
            part.epoch,
            build({n: trimmed(documents[n], part.update, config) for n in numbers([part])}, part.microbatches),
        )
        for part in parts
    ]


def trained_on(documents: Sequence[Document], parts: Sequence[Sequence[Part]], config: Config) -> list[Document]:
    """Those in an update of any rank, each as its first one trims it: later ones have no token that this one lacks."""
    first: dict[int, int] = {}
    for own in parts:
        for part in own:
            first = dict.fromkeys(numbers([part]), part.update) | first
    return [trimmed(documents[n], first[n], config) for n in sorted(first)]


def ages_of(documents: Sequence[Document], groups: Sequence[Group], config: Config) -> dict[str, Any]:
    """The fields of BatchStatistics about ages, over the tokens in the loss of these documents of the groups."""
    by_serial = {group.serial: group for group in groups}
    ages: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
    caches = [(0.0, 0)]
    for document in documents:
        assert document.staleness is not None
        mask = document.loss_mask > 0
        path = by_serial[document.serial].samples[document.sample].paths[document.path]
        ages.append(document.staleness[mask].astype(np.int64))
        caches.append(cache_age(path, mask, config))
    trained = np.concatenate(ages)
    count = max(len(trained), 1)
    return {
        "staleness_mean": int(trained.sum()) / count,
        "staleness_max": int(trained.max(initial=0)),
        "kv_cache_age_mean": sum(total for total, _ in caches) / count,
        "kv_cache_age_max": max(largest for _, largest in caches),
    }


def _trains(document: Document, update: int, config: Config) -> bool:
    """Whether the update's loss has any of its tokens; every document has some before the first update."""
    return config.staleness.max_updates is None or bool(trimmed(document, update, config).loss_mask.any())


def trimmed(document: Document, update: int, config: Config) -> Document:
    """The document without the tokens in its loss that staleness.max_updates leaves out of that update."""
    most = config.staleness.max_updates
    if most is None or document.staleness is None:
        return document
    ages = document.staleness.astype(np.int64) * config.learner.updates + update
    return replace(document, loss_mask=document.loss_mask * (ages <= most))
