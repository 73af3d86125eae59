"""The calls of the delivery contract, one class per role. A transport adds `ask`, which carries a request.

Every call raises BrokerUnreachable when no answer comes within the client's deadline. It raises BrokerError when the
broker refuses it, and UsageError when the broker refuses the credential. A call of an attached learner raises
StoreChanged when the broker's store lacks what the learner was told.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Self, TypeVar

from broker import contract, wire
from broker.contract import HeartbeatReply, LearnerReport, NodeReport
from common.evaluation import EvaluationOrder, EvaluationResult
from common.rollouts import GroupMeta, Task
from common.spans import SpanBatch

TAKE_PIECE_S = 1.0  # a longer wait is asked for in pieces; a dead link shows after one
LEASE_PIECE_S = 15.0
OFFER_TASKS = 512  # tasks in one message

R = TypeVar("R")


class ObserverBroker(ABC):
    """The calls of everyone with read access. They block; leaving the context closes the connection."""

    @abstractmethod
    def ask(self, request: wire.Request[R], wait_s: float = 0.0) -> R:
        """The answer to a request, for which the broker may wait `wait_s`."""

    def close(self) -> None:
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def status(self) -> contract.BrokerStatus:
        return self.ask(wire.AskStatus())

    def ledger(self) -> list[contract.LedgerEntry]:
        """Every task ever offered, ascending by serial; a line shows its task when its page was asked for."""
        return list(chain.from_iterable(self.ledger_pages()))

    def ledger_pages(self, unfinished: bool = False) -> Iterator[list[contract.LedgerEntry]]:
        """The ledger in parts, so that neither side needs memory for a long one; `unfinished`: only such tasks."""
        first = 0
        while page := self.ask(wire.AskLedger(first=first, unfinished=unfinished)):
            yield page
            first = page[-1].serial + 1

    def events(self, after: int) -> list[contract.BrokerEvent]:
        """Recent events with an index greater than `after`."""
        return self.ask(wire.AskEvents(after=after))

    def log(self, role: str) -> str | None:
        """The last 64 KiB of the log of `broker`, `learner`, `learner-RANK` or a node id; None: not there yet."""
        return self.ask(wire.AskLog(role=role))


class LearnerBroker(ObserverBroker):
    """The learner's calls, besides those of an observer."""

    position: contract.LogPosition | None = None  # the one in the newest answer that had one
    _identity: dict[str, Any] = {}  # incarnation and instance, once attached

    @property
    def _sender(self) -> dict[str, Any]:
        return self._identity and {**self._identity, "position": self.position}

    def attach(self, report: LearnerReport) -> contract.Attached:
        """A learner (re)starts. Raises BrokerError when it was replaced, or another of its incarnation is alive."""
        attached = self.ask(wire.Attach(report=report))
        self._identity = {"incarnation": report.incarnation, "instance": report.instance}
        return attached

    def offer(self, tasks: list[Task], changes: Sequence[contract.WeightChange] = (), first_change: int = 0) -> int:
        """Add tasks; serials already known are ignored. Returns how many were new. Raises BrokerError on a gap.

        `changes` of the weights of sources, from number `first_change` on, are recorded before the tasks.
        """
        parts = [tasks[start : start + OFFER_TASKS] for start in range(0, len(tasks), OFFER_TASKS)]
        told: dict[str, Any] = {**self._sender, "changes": list(changes), "first_change": first_change}
        return sum(self.ask(wire.Offer(**told, tasks=part)) for part in parts)

    def take(
        self, step: int, count: int, wait_s: float, in_order: bool = False, held: Sequence[str] = ()
    ) -> list[contract.StoredGroup] | None:
        """The `count` oldest ready groups for `step`, or what `step` took before; None when not ready in `wait_s`.

        Filtered groups that passed their place on do not count, and are among those returned. `in_order` never lets
        a group overtake another: it waits until the oldest living tasks that no step took are all ready. Groups with
        a token in `held` come without payload.
        """
        told: dict[str, Any] = {**self._sender, "step": step, "count": count, "in_order": in_order, "held": list(held)}
        end = time.monotonic() + wait_s
        while True:
            piece_s = min(max(0.0, end - time.monotonic()), TAKE_PIECE_S)
            groups = self.ask(wire.Take(**told, wait_s=piece_s), piece_s)
            if groups is not None or time.monotonic() >= end:
                return groups

    def look(self, step: int, count: int, held: Sequence[str]) -> list[contract.StoredGroup]:
        """Up to `count` of the oldest ready groups that are not `held`, for `step` to come; takes none of them."""
        told: dict[str, Any] = {**self._sender, "step": step, "count": count, "held": list(held)}
        return self.ask(wire.Take(**told, wait_s=0.0, look=True)) or []

    def regenerate(self, step: int, serials: list[int]) -> None:
        """Give up groups that `step` took: their tasks become pending again and `step` may take others."""
        self.ask(wire.Regenerate(**self._sender, step=step, serials=serials))

    def filter(self, step: int, serials: list[int], most_replaced: int) -> None:
        """`step` trains nothing on these groups that it took; it keeps them. May be repeated.

        At most `most_replaced` filtered groups of a step, the first ones, pass their place to the next task: then
        `take` gives as many more. Raises BrokerError when a serial was never offered, or is committed.
        """
        self.ask(wire.Filter(**self._sender, step=step, serials=serials, most_replaced=most_replaced))

    def commit(self, step: int) -> None:
        """Everything taken by steps <= `step` is in a durable checkpoint."""
        self.ask(wire.Commit(**self._sender, step=step))

    def evaluate(
        self, order: EvaluationOrder | None, tasks: list[Task], stored: list[int], shared: bool = False
    ) -> contract.Evaluated:
        """Offer held-out problems of a round and get results; a new `order` ends the round before, None any round.

        Problems that are known are ignored. `stored` are numbers of results that the caller has on its disk; the
        others come again. With `shared` the training fleet takes part from now on. May be repeated.
        """
        parts = [tasks[start : start + OFFER_TASKS] for start in range(0, len(tasks), OFFER_TASKS)] or [[]]
        told: dict[str, Any] = {**self._sender, "order": order, "stored": stored, "shared": shared}
        return [self.ask(wire.Evaluate(**told, tasks=part)) for part in parts][-1]

    def report(self, report: LearnerReport, log: str | None = None, log_rank: int = -1) -> HeartbeatReply | None:
        """Keep `status` current. The answer may ask for something; `log` is the text that the last one asked for."""
        return self.ask(wire.Report(**self._sender, report=report, log=log, log_rank=log_rank))

    def stop(self) -> contract.BrokerStatus:
        """Ask every role to leave; the answer says which are still `present`. May be repeated."""
        return self.ask(wire.Stop())

    def set_weights(self, request: contract.WeightRequest) -> int:
        """Ask for other weights of sources. They are durable when this returns the serial of the next task offered."""
        return self.ask(wire.SetWeights(request=request))

    def gather(
        self, report: contract.MachineReport, log: str | None = None, log_rank: int = -1
    ) -> contract.RendezvousOrder:
        """A machine of the learner is here; what its launcher is to do (broker/delivery/learner_machines.py)."""
        return self.ask(wire.Gather(report=report, log=log, log_rank=log_rank))

    def report_service(self, report: contract.ServiceReport, log: str | None = None) -> contract.ServiceOrder:
        """A scorer is here, or leaves; what it is to do. It has a node's key."""
        return self.ask(wire.ReportService(report=report, log=log))


class NodeBroker(ABC):
    """A node's calls, for the event loop that makes the first one. After `register` each of them names the run."""

    _run_id = ""  # that of the broker that answered `register`

    @abstractmethod
    async def ask(self, request: wire.Request[R], wait_s: float = 0.0, payload: bytes | None = None) -> R:
        """The answer to a request, which `payload` follows and for which the broker may wait `wait_s`."""

    def _sender(self, node_id: str) -> dict[str, Any]:
        return {"node_id": node_id, "run_id": self._run_id}

    @property
    def lease_piece_s(self) -> float:
        """Longest wait that is asked for at once."""
        return LEASE_PIECE_S

    async def close(self) -> None:
        """Give the connection up; calls under way raise BrokerUnreachable."""
        return

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def register(self, report: NodeReport) -> contract.RunInfo:
        run = await self.ask(wire.Register(report=report))
        self._run_id = run.run_id
        return run

    async def lease(self, node_id: str, version: int, max_groups: int, wait_s: float) -> list[contract.Lease]:
        """Up to `max_groups` oldest admissible tasks; waits at most `wait_s` for the first.

        While it waits, a heartbeat that reports a newer version makes that one count. A cancelled call hands back what
        the broker may have leased to it.
        """
        end = time.monotonic() + wait_s
        while True:
            left_s = max(0.0, end - time.monotonic())
            piece_s = min(left_s, self.lease_piece_s)
            told: dict[str, Any] = {"version": version, "max_groups": max_groups, "wait_s": piece_s}
            leases = await self.ask(wire.AskLease(**self._sender(node_id), **told), piece_s)
            if leases or left_s <= piece_s:
                return leases

    async def heartbeat(
        self, report: NodeReport, tokens: list[str], log: str | None = None, spans: SpanBatch | None = None
    ) -> HeartbeatReply:
        """Renew these leases; `log` is the end of the node's log that the last answer asked for."""
        return await self.ask(wire.Heartbeat(report=report, tokens=tokens, log=log, spans=spans))

    async def complete(self, node_id: str, token: str, meta: GroupMeta, payload: bytes) -> bool:
        """Hand in a group; False when the token is no longer current (the group is discarded and counted).

        Raises BrokerError also when the payload is larger than the broker takes; `fail` the lease then.
        """
        return await self.ask(wire.Complete(**self._sender(node_id), token=token, meta=meta), payload=payload)

    async def complete_evaluation(self, node_id: str, token: str, result: EvaluationResult) -> bool:
        """Hand in the samples of a held-out problem; False when the token is no longer current."""
        return await self.ask(wire.CompleteEvaluation(**self._sender(node_id), token=token, result=result))

    async def fail(
        self, node_id: str, token: str, reason: str, tokens: int = 0, seconds: float = 0.0, transcript: bytes = b""
    ) -> None:
        """The whole group failed, `tokens` sampled in `seconds` are lost; counts as an attempt.

        `transcript`: JSON of a Transcript of its longest sample, at most FAILED_BYTES; best effort.
        """
        cost: dict[str, Any] = {"tokens": tokens, "seconds": seconds, "transcript": transcript}
        await self.ask(wire.Fail(**self._sender(node_id), token=token, reason=reason[: wire.MAX_REASON_CHARS], **cost))

    async def release(self, node_id: str, tokens: list[str]) -> None:
        """Return leases without counting an attempt (drain)."""
        await self.ask(wire.Release(**self._sender(node_id), tokens=tokens))

    async def leave(self, node_id: str) -> None:
        """Leave the run; leases go back without counting an attempt."""
        await self.ask(wire.Leave(**self._sender(node_id)))
