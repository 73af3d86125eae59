"""The learner's side of the weight plane, on the lead rank. A version's way:

    training thread    WeightPublisher.publish: SnapshotMaker copies tensors     snapshot.py
          |            into a flat buffer
    preparing thread   Deltas: checksums, and deltas to earlier versions         snapshot.py, wire/delta.py
          |  offer
    control thread     OtherSources: until every source has its part             control.py, sources.py
          |            VersionSchedule: which version is for which node          snapshot.py
          |            split: by broadcast or by relay                           nodes.py
          |
          +- broadcast -> Attempt: buckets, to all members of a group            attempt.py, transports/groups.py
          +- relay -----> Chains: pieces of each part, from node to node         chains.py, transports/relay.py
          |
    the node           Receiver: verified in the staging buffer  -> Staged       receive/receiver.py
          |  Activate
          |            WeightClient: the engine flips and proves -> Active       receive/weight_client.py
          |
    control thread     NodeView: the node runs the version                       nodes.py

Words, everywhere in this room and in docs/weights.md:

    version   the policy's weights after a step; a snapshot is its copy here
    payload   the bytes that travel for a version: all of it, or a delta
    source    a rank of the learner that sends weights; in a chain also the node that another one fetches from
    part      the share of a payload that one rank of the learner sends
    bucket    a unit of a payload in a broadcast
    piece     a unit of a part over the relay, sealed with the part's key; a PartBuffer has a part's pieces
    chain     the nodes that get one payload by relay, each from the one before
    attempt   one payload on its way to one set of nodes, under a number of its own: the epoch

- Settled nodes get the newest version in one broadcast. A newer version waits until that attempt is over and then goes
  out; versions between them are skipped. A newcomer gets the current version at once over the relay.
- Only Staged counts as received. When an attempt fails, members that answer are tried again, and by relay when
  broadcasts keep failing with them. Dead and silent members are ejected, and the others regroup at once.
- Every wait has a deadline; docs/weights.md lists them.
"""

import logging
import threading
from collections.abc import Iterable, Iterator
from functools import partial

from torch import Tensor

from common.config.schema import WeightsConfig
from common.weights.source.adapters import AdapterPayloads
from common.weights.source.control import PublishControl
from common.weights.source.nodes import LostNode, PublishStats
from common.weights.source.snapshot import Deltas, Snapshot, SnapshotMaker, TensorSpecs
from common.weights.source.sources import LeadEndpoint
from common.weights.transports.groups import GroupFactory, open_group
from common.weights.transports.nccl import own_stream, remember_device
from common.weights.wire import messages
from common.weights.wire.layout import publish_bound

logger = logging.getLogger(__name__)


class WeightPublisher:
    """Sends policy versions to the nodes."""

    def __init__(
        self,
        incarnation: int,
        dtype: str,
        weights: WeightsConfig,
        *,
        credentials: str | None = None,
        group_factory: GroupFactory = open_group,
        bucket_bytes: int | None = None,
    ) -> None:
        """`dtype` is the engines' dtype; with `credentials`, a key folder, only its nodes may join.

        `bucket_bytes` replaces `weights.bucket_mib`, for buckets below one MiB.
        """
        self._incarnation = incarnation
        self._weights = weights
        self._credentials = credentials
        self._group_factory = group_factory
        self._bucket_bytes = bucket_bytes if bucket_bytes is not None else weights.bucket_mib << 20
        if weights.transport == "relay":
            self._bucket_bytes = 0  # pieces have checksums of their own
        self._published = 0
        self._version = -1
        self._deltas: Deltas | AdapterPayloads = Deltas(weights.encoding, weights.anchor_every)
        self._dtype = dtype
        of_device = weights.buffers == "device"
        here = remember_device() if of_device or weights.transport == "nccl" else None  # other threads form the groups
        self._device = here if of_device else None
        self._maker = SnapshotMaker(dtype, self._device)
        self._control: PublishControl | None = None
        self._thread: threading.Thread | None = None
        self._preparing: threading.Thread | None = None

    def start(self) -> str:
        """Bind the control endpoint and start the sending thread; returns the endpoint's address."""
        self._control = PublishControl(self._weights, self._incarnation, self._credentials, self._group_factory)
        self._thread = threading.Thread(target=self._control.run, daemon=True, name="weight-plane")
        self._thread.start()
        return self._control.address

    @property
    def _plane(self) -> PublishControl:
        assert self._control is not None, "used before start"
        return self._control

    def share(self, parts: list[TensorSpecs]) -> None:
        """Send the first of `parts` only, (name, shape) of tensors source by source; the others send theirs."""
        self._maker.share(parts, 0)
        self._plane.sources.count = len(parts) - 1

    @property
    def lead(self) -> LeadEndpoint:
        """The other sources need it to reach this one."""
        return LeadEndpoint(self._plane.address, self._incarnation, self._plane.password)

    def freeze(self, named: Iterable[tuple[str, Tensor]], factor: float) -> None:
        """Send adapters in the place of versions from now on; before the first `publish`.

        `named` are the frozen weights, as tensors of a version. `factor`: what B A is multiplied by.
        """
        self._deltas = AdapterPayloads(self._dtype, self._maker.make(-1, named, None), factor)

    def publish(
        self,
        version: int,
        named: Iterable[tuple[str, Tensor]],
        canary: messages.Canary | None,
        adapters: Iterable[tuple[str, Tensor]] | None = None,
    ) -> int:
        """Copy `named` (Hugging Face name, full tensor) into the flat buffer, and send it in the background.

        Returns the size of the version in bytes; the parameters may change again. After `share` these are the tensors
        of the first part. It consumes `named` to its end, because every rank must take part in producing it. After
        `freeze` it also needs `adapters` (name in Hugging Face's peft, full tensor), and consumes them after `named`.
        Without `weights.overlap` it also waits until the version is active on every node, at most `timeout_s`. Raises
        ValueError when names or shapes differ from the first version's.
        """
        if self._preparing is not None:
            self._preparing.join()  # versions are offered in order; hashing and encoding are far shorter than a step
        snapshot = self._maker.make(version, named, canary)
        if isinstance(self._deltas, AdapterPayloads) and adapters is not None:
            self._deltas.copy(snapshot, adapters)
        self._preparing = threading.Thread(target=self._prepare, args=(snapshot, self._plane), name="prepare-weights")
        self._preparing.start()
        self._published += 1
        self._version = version
        if not self._weights.overlap:
            timeout_s = publish_bound(self._weights.timeout_s, snapshot.layout.total_bytes)
            if not self._plane.figures.wait_settled(self._published, version, timeout_s):
                logger.warning("version %d is not active on every node after %g s; continuing", version, timeout_s)
        return snapshot.layout.total_bytes

    def hold(self, reason: str) -> None:
        """Let the nodes keep the newest version that `publish` got so far, until `release(reason)`.

        Call it from the thread that publishes. Several reasons may overlap. See VersionSchedule.
        """
        self._plane.post(partial(self._plane.schedule.hold, reason, self._version))

    def release(self, reason: str) -> None:
        """Send the newest version, unless another reason remains."""
        self._plane.post(partial(self._plane.schedule.release, reason))

    def evaluate(self, *versions: int) -> None:
        """Keep a copy of each of these versions, and give the first one to the nodes of the pool.

        A version is the one that `publish` got last, or is in the list of the call before.
        """
        self._plane.post(partial(self._plane.schedule.evaluate, versions))

    def lost_nodes(self) -> Iterator[LostNode]:
        """Those since the last call."""
        while self._control is not None and not self._control.figures.lost.empty():
            yield self._control.figures.lost.get()

    def stats(self) -> PublishStats:
        """Figures so far; cheap, callable from any thread."""
        return self._control.figures.now if self._control is not None else PublishStats()

    def close(self) -> None:
        """Stop sending and release the endpoint; a publish under way is finished or cut after the timeout."""
        if self._control is None or self._thread is None:
            return
        if self._preparing is not None:
            self._preparing.join()
        self._control.stop()
        self._thread.join(self._weights.timeout_s + 5)
        if self._thread.is_alive():
            logger.warning("the weight plane did not stop in time")

    def _prepare(self, snapshot: Snapshot, control: PublishControl) -> None:
        try:
            with own_stream(self._device, "prepare"):
                self._deltas.prepare(snapshot, self._bucket_bytes)
            control.offer(snapshot)
        except Exception as error:
            logger.exception("version %d cannot be sent", snapshot.version)
            control.figures.change(fatal=f"version {snapshot.version} cannot be sent: {error!r}", crashed=True)
