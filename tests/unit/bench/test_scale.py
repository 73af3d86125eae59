"""The model of large jobs: against closed forms, against small versions that play every event, and by hand."""

import argparse
import random
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import scale
from scale import (
    Cluster,
    Costs,
    Job,
    Large,
    chain_check,
    chain_s,
    constant,
    largest,
    lost_formula,
    lost_share,
    pieces_at_node,
)
from simulate import predict

CLUSTER = Cluster(
    machines=8, spares=100, failures_per_hour=0.02, interval_s=600, pause_s=5, durable_s=60, restart_s=300, repair_s=0
)
OPTIONS = argparse.Namespace(
    staleness=[1, 2, 4, 8], roots=[1, 8], piece_mib=[1.0], model_gib=1.0, link_gbit=80.0, failures_per_hour=[1e-3],
    every=20, pause_s=5.0, durable_s=0.0, restart_s=600.0, repair_s=0.0, spares=[0, 1], failures=2000, steps=9,
    large_piece_mib=1.0,
)  # fmt: skip
COSTS = Costs(node_us=100.0, group_us=500.0, lead_us=100.0, finished_bytes=100.0, token_bytes=10.0)


@pytest.mark.parametrize(("pieces", "nodes"), [(1, 1), (1, 5), (7, 1), (6, 4), (3, 40)])
def test_a_chain_takes_as_long_as_when_every_piece_is_played(pieces: int, nodes: int) -> None:
    ends = [0.0] * pieces  # when the node before has each piece
    for _ in range(nodes):  # a link carries one piece at a time, in 0.25 s
        ends = list(accumulate(ends, lambda busy_until, there: max(busy_until, there) + 0.25, initial=0.0))[1:]
    assert chain_s(size=pieces * 100.0, rate=400.0, piece=100.0, nodes=nodes) == pytest.approx(ends[-1])


def test_the_chain_fits_the_lab() -> None:
    assert 1 < pieces_at_node() < 5
    assert all(row["model"] == pytest.approx(row["measured"], rel=0.07) for row in chain_check(pieces_at_node()))


@pytest.mark.parametrize(
    "changed", [{}, {"durable_s": 0}, {"machines": 2}, {"machines": 64, "failures_per_hour": 0.05}]
)
def test_lost_time_is_that_of_the_formula_when_a_spare_is_there(changed: dict[str, Any]) -> None:
    cluster = replace(CLUSTER, **changed)
    assert lost_share(cluster, 40_000) == pytest.approx(lost_formula(cluster), abs=0.01)


def test_youngs_interval_loses_little_more_than_any_other() -> None:
    def lost(interval_s: float) -> float:
        return lost_formula(replace(CLUSTER, machines=1, durable_s=0, interval_s=interval_s))

    young = (2 * CLUSTER.pause_s * replace(CLUSTER, machines=1).between_s) ** 0.5
    assert lost(young) < min(lost(young / 3), lost(3 * young))
    assert lost(young) == pytest.approx(min(lost(young * k / 20) for k in range(5, 60)), abs=1e-4)


@pytest.mark.parametrize(("spares", "repair_s"), [(0, 0.0), (0, 5000.0), (1, 5000.0), (2, 9000.0)])
def test_lost_time_is_that_of_a_cluster_played_second_by_second(spares: int, repair_s: float) -> None:
    cluster = replace(CLUSTER, spares=spares, repair_s=repair_s)
    draw, back = random.Random(3), list[float]()
    second, durable_steps_s, worked_s = 0, 0, 0
    for _ in range(60):
        while sum(at > second for at in back) > spares:  # too few machines
            second += 1
        fails_at = second + draw.expovariate(1 / cluster.between_s)
        trains_at, worked_s, saved = second + cluster.restart_s, 0, list[tuple[float, float]]()
        while second + 1 <= fails_at:
            second += 1
            in_cycle = (second - trains_at) % (cluster.interval_s + cluster.pause_s)
            worked_s += second > trains_at and 0 < in_cycle <= cluster.interval_s
            if second > trains_at and in_cycle == 0:
                saved.append((second + cluster.durable_s, worked_s))
        durable_steps_s += max((steps for at, steps in saved if at <= fails_at), default=0)
        back.append(fails_at + repair_s)
    assert lost_share(cluster, 60, seed=3) == pytest.approx(1 - durable_steps_s / second, abs=0.02)


def test_few_simulated_nodes_stand_for_many() -> None:
    few, many = (predict(nodes, [2, 8], 15) for nodes in (8, 48))
    for one, other in zip(few, many, strict=True):
        assert one["asynchronous_step_s"] == pytest.approx(other["asynchronous_step_s"], rel=0.12)


def test_the_load_of_a_fleet_by_hand() -> None:
    job = Job(OPTIONS, COSTS, tokens=1000.0, step_s=20.0)
    load = job.load(1000)
    assert load["groups_per_s"] == 400
    assert load["broker_cores"] == pytest.approx(0.1 + 0.2)
    assert load["lead_share"] == pytest.approx(0.04)
    assert load["broker_mb_per_s"] == pytest.approx(2 * 400 * 8 * 1000 * 10 / 1e6)
    assert job.window_bytes(1000, 2) == pytest.approx(8000 * 3 * 80_000)
    assert job.publish_s(80, 8, 1.0) == pytest.approx(scale.HEADERS * 1.048576e-4 * (1024 + 9 * pieces_at_node()))
    row = job.failing(8, 1e-3)
    assert row["between_h"] == 125 and set(row["lost"]) == {"0", "1"}


def test_a_limit_is_the_last_size_that_fits_and_the_first_to_break_comes_first() -> None:
    assert largest(lambda n: n * n <= 1000) == 31
    assert largest(lambda n: n < 1) == 0
    assert largest(lambda n: True) is None
    job = Job(OPTIONS, COSTS, tokens=1000.0, step_s=20.0)
    found = {row["limit"]: row["largest"] for row in job.limits() if row["of"] == "nodes"}
    sizes = [size for size in found.values() if size is not None]
    assert sizes == sorted(sizes) and len(found) == 6
    most = found["one core of the broker"]
    assert most is not None
    assert job.load(most)["broker_cores"] <= 1 < job.load(most + 1)["broker_cores"]


def test_a_longer_publish_needs_a_wider_window() -> None:
    job = Job(argparse.Namespace(**{**vars(OPTIONS), "staleness": [1, 8], "link_gbit": 0.5}), COSTS, 1000.0, 28.85)
    row = job.window(64, 1, 1.0)
    assert row["publish_s"] > 10
    assert row["over_full"]["1"] > 1.5 * row["over_full"]["8"] > 1


def test_the_parts_of_a_large_job_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        "node_us": 100.0,
        "group_us": 300.0,
        "large_group_us": 300.0,
        "snapshot_us": 4.0,
        "forwarded_s_per_gib": 1.5,
        "ahead_s": 64.0,
        "prepare_s": 2.0,
        "deliver_s": 30.0,
        "copied_s_per_gib": 0.5,
    }
    monkeypatch.setattr(scale, "constant", known.get)
    job = Large(OPTIONS, COSTS, gib=10.0, node_tokens_per_s=6400.0, tokens=1000, machines=8)
    assert job.step_s == 10.0
    parts = job.parts(1000)
    assert [part.load for part in parts] == sorted((part.load for part in parts), reverse=True)
    loads = {part.name: part.load for part in parts}
    assert loads["broker's core"] == pytest.approx(0.1 + 800 * 304e-6)
    assert loads["broker's link"] == pytest.approx(800 * 80_000 / 10e9)
    assert loads["a node's core, weights"] == pytest.approx(1.5)
    assert loads["lead rank, next groups"] == pytest.approx(64.0 * 1000 * 64_000 / 2**30 / 10.0)
    assert loads["lead rank, batches"] == pytest.approx(32.0 * 1000 * 64_000 / 2**30 / 10.0 / 0.1)
    assert loads["a checkpoint's stall, over a step"] == pytest.approx(10.0 * 7 / 64 * 0.5 / 10.0)
    assert "lead rank, control of weights" not in loads, "nothing has measured it"


def test_every_constant_is_where_it_is_said_to_be_or_its_result_is_missing() -> None:
    for name, (source, _) in scale.CONSTANTS.items():
        value = constant(name)
        there = (scale.RESULTS / f"{source}.json").exists()
        assert (value is not None and value > 0) == there, name
