"""The node's side of the weight plane: follows a learner, stages what it sends, flips the engine, proves the result.

Two tasks: one reads the learner's messages and answers pings at once, the other works through them in order.
A publish that is being staged is watched by a third, so that a newer one can take its place.
"""

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from statistics import fmean
from typing import Any, Literal

import zmq
import zmq.asyncio

from common.errors import SlipstreamError
from common.process.local_address import needs_ipv6, this_machine
from common.security.credentials import Credential
from common.security.curve import Handshakes, secure_client
from common.span_buffer import SPANS
from common.weights.receive.contract import Flip, Watch, WeightsState, WeightTarget
from common.weights.receive.receiver import StagingStatus
from common.weights.transports.nccl import shared_versions
from common.weights.transports.relay import Stall
from common.weights.wire import messages
from common.weights.wire.failures import Failure, FailureKind, ProofFailed, StagingFailed
from common.weights.wire.messages import Canary, Publish

logger = logging.getLogger(__name__)

MAX_LEARNER_MESSAGE_BYTES = 256 << 20  # a layout of a large mixture-of-experts model takes tens of MB
REJOIN_AFTER_S = 15.0  # without any message from the learner, which pings once a second
EJECTED_PAUSE_S = 0.5
AGAIN_S = 1.0  # between two reports that a part stands still
FIRST_POLL_S = 0.002  # bounds on the pauses between two questions whether a version is staged
LAST_POLL_S = 0.02

Job = tuple[messages.LearnerMessage, bytes]  # a message, and the same as it came: the target decodes it itself


class WeightClient:
    """Receives versions and flips the engine in its own tasks; the node reads `state` and passes addresses on."""

    def __init__(
        self,
        node_id: str,
        target: WeightTarget,
        *,
        credential: Credential | None = None,
        transports: tuple[str, ...] = ("gloo", "relay"),
        reached: Callable[[Literal["staged", "active"]], object] = lambda stage: None,
        pool: str = "",
    ) -> None:
        """Needs a running event loop only from `follow` on.

        `transports`: the ways by which the target can receive. `reached` is called when a version is staged, and when
        it is active.
        """
        self._node_id = node_id
        self._pool = pool
        self._target = target
        self._transports = transports
        self._reached = reached
        self._credential = credential
        self._handshakes: Handshakes | None = None
        self.state = WeightsState()  # replaced as a whole; for reading
        self._changed = asyncio.Condition()
        self._address = ""  # the learner's that this node follows
        self._incarnation = -1  # that learner's
        self._socket: zmq.asyncio.Socket | None = None
        self._jobs: asyncio.Queue[Job] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._staging: asyncio.Task[None] | None = None
        self._staged: Publish | None = None
        self._aftermath: asyncio.Task[None] | None = None  # after a flip whose learner is gone
        self._frozen = ""  # checksum of the frozen weights that the target keeps
        self._closed = False

    def follow(self, address: str, incarnation: int) -> None:
        """The learner's control endpoint, from every heartbeat reply; '' while no learner is attached. Idempotent."""
        if self._closed or self.state.excluded is not None or not address or incarnation < self._incarnation:
            return
        if (address, incarnation) == (self._address, self._incarnation):
            return
        logger.info("following the learner at %s (incarnation %d)", address, incarnation)
        self._address = address
        self._incarnation = incarnation
        self._disconnect()
        self._connect()

    async def wait_change(self, timeout_s: float) -> WeightsState:
        """Return when `state` differs from what it was at the call, or after `timeout_s`."""
        before = self.state
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.state != before)
        return self.state

    async def close(self) -> None:
        """Leave the group and end the tasks."""
        self._closed = True
        with contextlib.suppress(zmq.ZMQError, TimeoutError):
            await asyncio.wait_for(self._send(messages.Leave(self._node_id)), 1)
        tasks = [*self._tasks, *([self._staging] if self._staging else [])]
        if self._aftermath is not None:
            self._aftermath.cancel()
        self._disconnect()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _connect(self) -> None:
        address = self._address
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_LEARNER_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.IPV6, int(needs_ipv6(address)))
        if self._credential is not None:
            secure_client(self._socket, self._credential, self._credential.learner_public)
        self._handshakes = Handshakes(self._socket, f"the learner's weight plane at {address}", self._credential)
        self._socket.connect(address)
        self._jobs = asyncio.Queue()
        self._tasks = [asyncio.create_task(work) for work in (self._read(self._socket), self._work(self._jobs))]
        for task in self._tasks:
            task.add_done_callback(self._connect_again)

    def _connect_again(self, ended: "asyncio.Task[None]") -> None:
        error = None if ended.cancelled() else ended.exception()
        if error is not None and ended in self._tasks:  # else its connection was closed, and the cancellation came late
            logger.error("joining the weight plane anew at the next heartbeat", exc_info=error)
            self._address = ""

    def _disconnect(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        self._cancel_staging()
        if self._handshakes is not None:
            self._handshakes.close()
            self._handshakes = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _send(self, message: messages.NodeMessage) -> None:
        if self._socket is not None:
            await self._socket.send(messages.encode(message))

    async def _join(self) -> None:
        if self.state.excluded is None:
            join = messages.Join(
                node_id=self._node_id,
                pid=os.getpid(),
                incarnation=self.state.incarnation,
                version=self.state.version,
                transports=self._transports,
                versions=shared_versions(),
                machine=this_machine(),
                pool=self._pool,
                frozen=self._frozen,
            )
            await self._send(join)

    async def _read(self, connection: zmq.asyncio.Socket) -> None:
        await self._join()
        while True:
            try:
                data = await asyncio.wait_for(connection.recv(), REJOIN_AFTER_S)
            except TimeoutError:
                refusal = self._handshakes.refusal() if self._handshakes is not None else ""
                if refusal:
                    logger.error("%s", refusal)
                    await self._change(refused=refusal)
                await self._join()
                continue
            try:
                message = messages.decode_from_learner(data)
            except ValueError as error:
                logger.warning("the learner sent what does not decode: %s", error)
                continue
            if isinstance(message, messages.Ping):
                await self._send(messages.Pong(self._node_id))
            elif isinstance(message, messages.Eject):
                logger.warning("ejected from the weight plane: %s", message.reason)
                self._cancel_staging()
                if message.final:
                    await self._exclude(message, Failure(FailureKind.MISMATCH, message.reason))
                await asyncio.sleep(EJECTED_PAUSE_S)
                await self._join()
            else:
                self._jobs.put_nowait((message, data))

    async def _work(self, jobs: asyncio.Queue[Job]) -> None:
        while True:
            message, data = await jobs.get()
            try:
                await self._do(message, data)
            except Exception as error:  # an engine that fails must not be used, and the learner must hear it
                await self._exclude(message, _failure(error))

    async def _do(self, message: messages.LearnerMessage, data: bytes) -> None:
        if self.state.excluded is not None:
            return
        if isinstance(message, messages.Welcome | messages.Epoch):
            self._cancel_staging()
            answer = await self._target.tell(data, self._node_id)
            if answer and self._socket is not None:
                await self._socket.send(answer)
        elif isinstance(message, Publish):
            self._cancel_staging()
            self._staged = None
            self._staging = asyncio.create_task(self._stage(message, data))
        elif isinstance(message, messages.Activate):
            await self._activate(message)
        elif isinstance(message, messages.StoreEntries | messages.Reroute | messages.Serve):
            try:
                await self._target.tell(data, self._node_id)
            except SlipstreamError as error:  # the transfer that needs it fails; that is heard of
                logger.warning("a %s was not carried out: %s", type(message).__name__, error)

    def _cancel_staging(self) -> None:
        if self._staging is not None:
            self._staging.cancel()
        self._staging = None

    async def _stage(self, publish: Publish, data: bytes) -> None:
        began = time.perf_counter()
        try:
            seconds = await self._target.stage(data, StagingReports(self._node_id, self._send).tell)
        except ProofFailed as error:  # the engine hangs
            await self._exclude(publish, Failure.of(error))
            return
        except Exception as error:  # the learner must hear of any
            if not isinstance(error, StagingFailed):
                logger.exception("version %d cannot be staged", publish.version)
            await self._reject(publish.incarnation, publish.version, Failure.of(error), epoch=publish.epoch)
            return
        self._staged = publish
        self._frozen = publish.frozen or self._frozen
        told = {"version": publish.version, "incarnation": publish.incarnation}
        SPANS.add(f"receive version {publish.version}", "stage", began, track="weights/receive", **told)
        self._reached("staged")
        await self._send(
            messages.Staged(self._node_id, publish.incarnation, publish.version, receive_s=seconds, epoch=publish.epoch)
        )

    async def _activate(self, message: messages.Activate) -> None:
        publish = self._staged
        if publish is None or (publish.incarnation, publish.version) != (message.incarnation, message.version):
            logger.info("version %d is not what is staged here; ignored", message.version)
            return
        self._staged = None
        started = time.perf_counter()
        await self._change(flipping=True)
        flipping = asyncio.ensure_future(self._target.flip(publish.incarnation, publish.version, publish.checksum))
        try:
            flip = await asyncio.shield(flipping)
            difference = await self._compare(publish.canary) if publish.canary is not None else None
        except asyncio.CancelledError:  # the connection has ended; the engine flips all the same
            if self._closed:
                flipping.cancel()
            else:
                self._aftermath = asyncio.create_task(self._settle(flipping, publish))
            raise
        except Exception as error:
            await self._exclude(message, _failure(error))
            return
        state = self.state
        self._reached("active")
        await self._change(
            version=publish.version,
            incarnation=publish.incarnation,
            flipping=False,
            refused="",
            flips=state.flips + 1,
            stall_s=state.stall_s + flip.stall_s,
            canary_max_difference=state.canary_max_difference if difference is None else difference,
        )
        took = time.perf_counter() - started
        told = {"version": publish.version, "incarnation": publish.incarnation, "stall_s": flip.stall_s}
        SPANS.add(f"flip to version {publish.version}", "flip", started, track="weights", **told)
        logger.info("version %d active: flip and proof %.3f s, stall %.3f s", publish.version, took, flip.stall_s)
        active = messages.Active(
            node_id=self._node_id,
            incarnation=publish.incarnation,
            version=publish.version,
            stall_s=flip.stall_s,
            checksum=flip.checksum,
            canary_max_difference=difference,
        )
        await self._send(active)

    async def _settle(self, flipping: "asyncio.Future[Flip]", publish: Publish) -> None:
        """Say how a flip ended whose learner is gone. Its canary is not read: the next learner has its own."""
        try:
            flip = await flipping
        except Exception as error:
            await self._exclude(publish, _failure(error))
            return
        state = self.state
        counts = {"flips": state.flips + 1, "stall_s": state.stall_s + flip.stall_s}
        await self._change(version=publish.version, incarnation=publish.incarnation, flipping=False, **counts)

    async def _compare(self, canary: Canary) -> float:
        """Largest |difference| between the learner's and this engine's log-probabilities; raises ProofFailed.

        The tolerance bounds the largest difference, or the mean one where the engine's weights are rounded.
        """
        read = await self._target.canary(canary.tokens)
        if len(read.logprobs) != len(canary.logprobs):
            counts = f"canary of {len(canary.logprobs)} log-probabilities, the engine gave {len(read.logprobs)}"
            raise ProofFailed(counts, FailureKind.CANARY)
        learners = _absolute(a - b for a, b in zip(read.logprobs, canary.logprobs, strict=True))
        decoding = _absolute(read.decoding_differs)
        for what, differences in (("the learner's", learners), ("itself between decoding and prefill", decoding)):
            difference = fmean(differences or [0.0]) if read.rounded else max(differences, default=0.0)
            if difference > canary.tolerance:
                text = f"canary differs from {what} by {difference:.4g}, tolerance {canary.tolerance:g}"
                raise ProofFailed(text, FailureKind.CANARY)
        return max(learners, default=0.0)

    async def _exclude(self, message: messages.LearnerMessage, failure: Failure) -> None:
        logger.error("this node stops generating: %s", failure.text)
        with contextlib.suppress(Exception):  # the engine may be what is broken
            await self._target.exclude(failure.text)
        await self._change(excluded=failure.text, flipping=False)
        incarnation = getattr(message, "incarnation", self._incarnation)
        await self._reject(incarnation, getattr(message, "version", -1), failure, fatal=True)

    async def _reject(
        self, incarnation: int, version: int, failure: Failure, *, fatal: bool = False, epoch: int = -1
    ) -> None:
        rejected = messages.Rejected(
            self._node_id, incarnation, version, reason=failure.text, fatal=fatal, epoch=epoch, kind=failure.kind
        )
        await self._send(rejected)

    async def _change(self, **changes: Any) -> None:
        async with self._changed:
            self.state = replace(self.state, **changes)
            self._changed.notify_all()


def _failure(error: Exception) -> Failure:
    known = isinstance(error, ProofFailed)
    return Failure.of(error) if known else Failure(FailureKind.ENGINE, f"{type(error).__name__}: {error}")


def _absolute(differences: Iterable[float]) -> list[float]:
    return [math.inf if math.isnan(d) else abs(d) for d in differences]


class StagingReports:
    """Tells the learner while a version arrives: where its group can be met, and which parts stand still."""

    def __init__(self, node_id: str, send: Callable[[messages.NodeMessage], Awaitable[None]]) -> None:
        self._node_id = node_id
        self._send = send
        self._entries: set[str] = set()
        self._said: dict[int, tuple[Stall, float]] = {}  # by part: the last report, and when

    async def tell(self, status: StagingStatus) -> None:
        new = {key: value for key, value in status.entries.items() if key not in self._entries}
        if new:
            self._entries |= new.keys()
            await self._send(messages.StoreEntries(status.epoch, new))
        now = time.monotonic()
        for part, stall in status.stalls.items():
            said = self._said.get(part)
            if said is None or said[0] != stall or now - said[1] >= AGAIN_S:
                self._said[part] = stall, now
                stalled = messages.Stalled(
                    node_id=self._node_id,
                    epoch=status.epoch,
                    part=part,
                    source=stall.source,
                    pieces=stall.pieces,
                    reason=stall.reason[:1000],
                )
                await self._send(stalled)


async def until_staged(read: Callable[[], Awaitable[StagingStatus]], watch: Watch) -> float:
    """Seconds that the newest publish took to be staged, by its `read` status; raises StagingFailed.

    Every question interrupts the engine between two steps, and a late one keeps a version waiting. So it asks seldom
    while most of the version is to come.
    """
    started = time.perf_counter()
    pause_s = FIRST_POLL_S
    while True:
        await asyncio.sleep(pause_s)
        status = await read()
        await watch(status)
        if status.state == "staged":
            return status.receive_s
        if status.state != "receiving":
            failure = status.failure or Failure(FailureKind.GIVEN_UP, "the transfer was given up")
            raise StagingFailed(failure.text, failure.kind)
        pause_s = next_poll_s(time.perf_counter() - started, status.share)


def next_poll_s(took_s: float, share: float) -> float:
    """Half of the time until the rest should be there, when `share` (0 to 1) took so long; within the bounds of a poll.

    The last buckets come sooner than their share says, because the next one travels while one is verified. A version
    of one bucket has no share until it is there; each of its polls comes after one and a half times the time.
    """
    left_s = took_s * (1 / share - 1) if share > 0 else took_s
    return min(max(left_s / 2, FIRST_POLL_S), LAST_POLL_S)
