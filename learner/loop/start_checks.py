"""Refusals at a start: a checkpoint and a broker that do not fit one another."""

from collections.abc import Callable, Sequence

from broker.contract import LedgerEntry
from common.errors import UsageError


def check_not_behind(version: int, committed_step: int) -> None:
    """Refuse a checkpoint of `version` that lacks steps which the broker has committed; -1 for none."""
    if committed_step < version:
        return
    first = f"its checkpoint is of step {version}" if version else "it has no checkpoint"
    raise UsageError(
        f"the learner would train step {version} next ({first}). The broker has committed steps up to "
        f"{committed_step}: the groups of steps {version} to {committed_step} are gone. Put a checkpoint of step "
        f"{committed_step + 1} back into RUN/checkpoints, or start anew in another run.dir"
    )


def check_not_forgotten(version: int, consumed: Callable[[int], bool], ledger: Sequence[LedgerEntry]) -> None:
    """Refuse a broker that would hand out groups which the checkpoint of `version` was trained on."""
    again = [entry for entry in ledger if entry.state not in ("committed", "dead") and consumed(entry.serial)]
    if not again:
        return
    raise UsageError(
        f"the checkpoint of step {version} was trained on {len(again)} groups that the broker does not know as taken "
        f"(the first is task {again[0].serial}, {again[0].state}). Its store lost the newest moves, as in a power cut "
        "with broker.durability: everysec, or was put back from a copy. They would be trained on twice. Move RUN/store "
        "away (with broker.store: redis the run's keys and RUN/redis.json, docs/redis.md) and start again: what the "
        "checkpoint has not consumed is then generated anew"
    )
