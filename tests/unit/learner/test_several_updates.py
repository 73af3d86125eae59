"""Several updates per batch in the training loop, against plain loops over groups and tokens in float64."""

import shutil
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from broker.contract import LedgerEntry
from common.process.health import LifeSigns
from common.rollouts import Group, VersionRun, encode_group
from learner.batch.packing import build
from learner.batch.updates import minibatches
from learner.loop.updates import with_columns
from tests.unit.learner.loop_fakes import VOCAB, MakeWorld, World, make_group

STEPS, GROUPS, SIZE, EPOCHS, PARTS = 4, 4, 3, 2, 2
UPDATES = EPOCHS * PARTS
RATE = 6.0  # so that ratios leave the bounds of the objective
STOP = 1e-5  # so near that the second update is left out in some steps
HALF: dict[str, Any] = {"clip_low": 0.1, "clip_high": 0.1}


def several(make_world: MakeWorld, loss: dict[str, Any] | None = None, **sections: Any) -> World:
    """Four updates a step, at a staleness of up to two versions."""
    learner = {"groups_per_step": GROUPS, "epochs": EPOCHS, "minibatches": PARTS, "loss": loss or {}}
    learner |= sections.pop("learner", {})
    sections = {"run": {"steps": STEPS, "seed": 5}, "rollout": {"group_size": SIZE}} | sections
    world = make_world(lag=sections.pop("lag", 1), learner=learner, **sections)
    world.backend.rate = RATE
    return world


# ---------------------------------------------------------------- the loop, written out


class Plain:
    """The run of `several` from its ledger: every token on its own, in float64."""

    def __init__(self, ledger: list[LedgerEntry], loglinear: bool = False, **options: Any) -> None:
        self.ledger, self.loglinear, self.options = ledger, loglinear, options
        self.table = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
        self.trained = [0] * STEPS  # tokens in one update at least
        self.updates = [0] * STEPS
        self.clipped = 0
        for step in range(STEPS):
            self._step(step)

    def _step(self, step: int) -> None:
        groups = {e.serial: (e.version_min, make_group(e.serial, 0, SIZE)) for e in self.ledger if e.step == step}
        begin = self.table.log_softmax(-1)
        serials = [serial for serial in sorted(groups) for _ in range(SIZE)]
        seen = set[tuple[int, int, int]]()
        for update in range(UPDATES):
            order = minibatches(serials, PARTS, seed=5, step=step, epoch=update // PARTS)[update % PARTS]
            chosen = sorted({serials[n] for n in order})
            table = self.table.clone().requires_grad_()
            total, count, moved = torch.zeros((), dtype=torch.float64), 0, 0.0
            for serial in chosen:
                version, group = groups[serial]
                for token in self._tokens(group, step - version, update, table.log_softmax(-1), begin):
                    value, divergence, place = token
                    total, count, moved = total + value, count + 1, moved + divergence
                    seen.add((serial, *place))
            if count and moved / count > self.options.get("kl_stop", float("inf")):
                break
            if count:
                (gradient,) = torch.autograd.grad(-total / count, table)
                self.table = self.table - RATE * gradient
                self.updates[step] += 1
                self.trained[step] = len(seen)

    def _tokens(
        self, group: Any, age: int, update: int, policy: Tensor, begin: Tensor
    ) -> Iterator[tuple[Tensor, float, tuple[int, int]]]:
        """(term of the objective, divergence from the beginning, sample and place) of every token in the loss."""
        rewards = np.array([sample.reward for sample in group.samples])
        spread = rewards.std(ddof=1)
        for i, sample in enumerate(group.samples):
            advantage = (rewards[i] - rewards.mean()) / (spread + 1e-6)
            ids = sample.tokens.numpy().tolist()
            for t in range(2, len(ids)):
                if age * UPDATES + update > self.options.get("max_updates", 1 << 30):
                    continue
                now, frozen, behavior = policy[ids[t - 1], ids[t]], begin[ids[t - 1], ids[t]].item(), -2.0
                share = (max(age, 1) - 1) / max(age, 1)
                center = behavior + share * (frozen - behavior) if self.loglinear else frozen
                ratio = torch.exp(now - center)
                bound = min(max(ratio.item(), 0.9), 1.1)
                value = ratio * advantage
                if bound * advantage < value.item():
                    value, self.clipped = now * 0 + bound * advantage, self.clipped + 1
                way = now.item() - frozen
                yield min(np.exp(center - behavior), 2.0) * value, np.expm1(way) - way, (i, t)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (HALF, {}),
        (HALF | {"proximal": "loglinear"}, {"loglinear": True}),
        (HALF | {"kl_stop": STOP}, {"kl_stop": STOP}),
        (HALF, {"max_updates": 6}),
    ],
    ids=["recompute", "loglinear", "kl_stop", "max_updates"],
)
def test_a_run_is_the_plain_loop_over_its_groups_updates_and_tokens(
    make_world: MakeWorld, loss: dict[str, Any], options: dict[str, Any]
) -> None:
    most = options.get("max_updates")
    world = several(make_world, loss, staleness={"max": 2, "max_updates": most})
    assert world.run() == "done"
    plain = Plain(world.broker.ledger(), **options)
    np.testing.assert_allclose(world.final_table(), plain.table.numpy(), atol=2e-5)
    assert plain.clipped > 0 or "kl_stop" in options, "the bounds have acted"
    found = world.lines()
    assert [line.updates for line in found] == plain.updates
    assert [line.tokens_trained for line in found] == plain.trained
    sampled = [sum(token_counts(e.serial) for e in world.broker.ledger() if e.step == step) for step in range(STEPS)]
    assert [line.tokens_trained + line.tokens_unused for line in found] == sampled
    assert [sum(line.tokens_by_age) for line in found] == plain.trained, "a token counts once"
    assert found[-1].tokens_trained_total == sum(plain.trained)
    assert found[-1].tokens_wasted_masked == sum(sampled) - sum(plain.trained)
    if options.keys() & {"kl_stop", "max_updates"}:
        assert min(plain.updates) < UPDATES and 0 < sum(plain.trained) < sum(sampled)
    else:
        assert {line.updates for line in found} == {UPDATES}
        for line in found:
            assert 0 <= line.staleness_max * UPDATES + UPDATES - 1 - line.update_age_max < PARTS
        mean = [UPDATES * line.staleness_mean + (UPDATES - 1) / 2 for line in found]
        assert [line.update_age_mean for line in found] == pytest.approx(mean, abs=0.6), "parts differ in size"
    if most is not None:
        assert max(line.update_age_max for line in found) == most
    if "kl_stop" in options:
        assert all((line.batch_kl > STOP) == (line.updates < UPDATES) for line in found)


@pytest.mark.parametrize("stop", [STOP, None], ids=["kl_stop", "max_updates"])
def test_a_line_s_staleness_is_that_of_the_tokens_that_an_update_trained_on(
    make_world: MakeWorld, stop: float | None
) -> None:
    """Groups of ages from 0 to 2 in one step."""

    def aged(group: Group) -> bytes:
        runs = [VersionRun(2, max(0, group.serial // GROUPS - group.serial % 3))]
        return encode_group(Group(group.serial, [msgspec.structs.replace(s, version_runs=runs) for s in group.samples]))

    staleness = {"max": 2, "max_updates": None if stop else 2 * UPDATES - 1}
    world = several(make_world, {"kl_stop": stop} if stop else {}, staleness=staleness)
    world.fleet.spoil = aged
    assert world.run() == "done"
    found = world.lines()
    assert any(line.tokens_unused and line.tokens_trained for line in found)
    for line in found:
        ages = np.repeat(np.arange(len(line.tokens_by_age)), line.tokens_by_age)
        assert (line.staleness_max, line.staleness_mean) == (max(ages), pytest.approx(ages.mean()))


def token_counts(serial: int) -> int:
    return sum(int(sample.loss_mask.numpy().sum()) for sample in make_group(serial, 0, SIZE).samples)


# ---------------------------------------------------------------- what stays as it is


def test_one_update_freezes_nothing_and_several_freeze_once_and_ask_the_reference_once(make_world: MakeWorld) -> None:
    def asked(epochs: int, parts: int) -> tuple[list[int], list[int]]:
        learner = {"epochs": epochs, "minibatches": parts}
        world = several(make_world, {"kl_coefficient": 0.1}, learner=learner, weights={"canary_every": 0})
        frozen, referred = list[int](), list[int]()
        logprobs, reference = world.backend.logprobs, world.backend.reference_logprobs
        world.backend.logprobs = lambda *a: frozen.append(len(a)) or logprobs(*a)  # type: ignore[method-assign]
        world.backend.reference_logprobs = lambda *a: referred.append(1) or reference(*a)  # type: ignore[method-assign]
        world.run()
        assert all(line.kl_mean >= 0 for line in world.lines()) and world.lines()[-1].kl_mean > 0
        shutil.rmtree(world.run_dir.path)
        return frozen, referred

    assert asked(1, 1) == ([1], [1] * STEPS), "the canary alone"
    assert asked(EPOCHS, PARTS) == ([1] + [2] * STEPS, [1] * STEPS)


@pytest.mark.parametrize("objective", ["ppo_clip", "gspo", "dppo_tv", "cispo"])
def test_at_a_learning_rate_of_zero_no_token_is_clipped(make_world: MakeWorld, objective: str) -> None:
    """With bounds that any movement would leave; the sampler's log-probabilities as the centre would be outside."""
    world = several(make_world, {"objective": objective, "clip_low": 1e-9, "clip_high": 1e-9})
    world.backend.rate = 0.0
    assert world.run() == "done"
    for line in world.lines():
        assert (line.updates, line.objective_clip_fraction, line.batch_kl) == (UPDATES, 0.0, 0.0)
        assert line.ratio_mean != pytest.approx(1.0, abs=0.1), "the samples are not from this policy"


@pytest.mark.parametrize("killed_at", [1, 5, 9, 11, 14])
def test_killed_between_two_updates_of_a_batch_it_trains_the_batch_again_and_ends_bitwise_equal(
    make_world: MakeWorld, killed_at: int
) -> None:
    whole = several(make_world, HALF)
    expected, ledger = whole.unbroken(), whole.broker.ledger()
    world = whole.with_new_broker()
    world.fleet.lag, world.backend.rate, world.backend.fail_at = 1, RATE, killed_at
    world.run_killed()
    assert killed_at % UPDATES and len(world.lines()) == killed_at // UPDATES
    again = world.restart()
    again.fleet.lag, again.backend.rate = 1, RATE
    assert again.trainer.version == killed_at // UPDATES // 2 * 2
    assert again.backend.steps == again.trainer.version * UPDATES
    assert again.run() == "done"
    np.testing.assert_array_equal(world.final_table(), expected)
    assert [(e.serial, e.step, e.state) for e in again.broker.ledger()] == [
        (e.serial, e.step, "committed") for e in ledger
    ]
    found = world.lines()
    assert [line.step for line in found] == list(range(STEPS))
    assert found[-1].tokens_trained_total == sum(line.tokens_trained for line in found)


def test_every_update_is_a_sign_of_life(make_world: MakeWorld) -> None:
    world = several(make_world)
    now = [0.0]
    world.trainer.signs = LifeSigns(10.0, lambda: now[0])
    train = world.backend.train_step
    healthy: list[int] = []

    def slow(*arguments: Any) -> Any:
        now[0] += 8.0
        healthy.append(world.trainer.signs.answer("/healthz")[0])
        return train(*arguments)

    world.backend.train_step = slow  # type: ignore[method-assign]
    assert world.run() == "done"
    assert healthy == [200] * STEPS * UPDATES, "a step takes longer than learner.timeout_s, no update does"


def test_a_step_with_fewer_groups_than_minibatches_has_fewer_updates(make_world: MakeWorld) -> None:
    """All samples of every third group have failed."""
    world = several(make_world, learner={"groups_per_step": 3, "minibatches": 3})

    def spoil(group: Group) -> bytes:
        failed = [msgspec.structs.replace(s, error="no calculator") for s in group.samples]
        return encode_group(Group(group.serial, failed) if group.serial % 3 == 1 else group)

    world.fleet.spoil = spoil
    assert world.run() == "done"
    assert [line.updates for line in world.lines()] == [EPOCHS * 2] * STEPS


def test_updates_of_one_group_each_train_on_one_group(make_world: MakeWorld) -> None:
    world = several(make_world, learner={"minibatches": GROUPS})
    train, serials = world.backend.train_step, list[list[int]]()

    def noting(microbatches: Any, *rest: Any) -> Any:
        documents = [n for batch in microbatches for n in batch.numbers]
        serials.append(sorted({n // SIZE for n in documents}))
        assert len(documents) == SIZE
        return train(microbatches, *rest)

    world.backend.train_step = noting  # type: ignore[method-assign]
    assert world.run() == "done"
    assert len(serials) == STEPS * EPOCHS * GROUPS and all(len(own) == 1 for own in serials)
    epochs = [serials[at : at + GROUPS] for at in range(0, len(serials), GROUPS)]
    assert all(sorted(epoch) == [[n] for n in range(GROUPS)] for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) > 1


def test_a_rank_without_a_document_gets_columns_for_its_fillers() -> None:
    (filler,) = build({}, [[]])
    known: dict[str, dict[int, torch.Tensor]] = {"proximal_logprobs": {}, "marked": {}}
    given = with_columns(filler, known)
    assert given.proximal_logprobs is not None and given.proximal_logprobs.tolist() == [0.0] * len(filler.targets)
    assert given.marked is not None and given.marked.dtype == torch.bool and not given.marked.any()
