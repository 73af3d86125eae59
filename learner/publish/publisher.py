"""The learner's side of the weight plane, on the lead rank: copy a version, let a thread bring it to the nodes."""

import logging
import threading
from collections.abc import Iterable
from functools import partial

from torch import Tensor

from common.config.schema import WeightsConfig
from common.weights.collectives import GroupFactory
from common.weights.messages import Canary
from common.weights.transports.device import own_stream
from common.weights.transports.nccl import remember_device
from common.weights.transports.registry import open_group
from learner.publish.control import PublishControl
from learner.publish.figures import PublishStats
from learner.publish.other_sources import Lead
from learner.publish.snapshot import Deltas, Named, Snapshot, SnapshotMaker

logger = logging.getLogger(__name__)


class WeightPublisher:
    """Sends policy versions to the nodes."""

    def __init__(
        self,
        incarnation: int,
        dtype: str,
        weights: WeightsConfig,
        credentials: str | None = None,
        group_factory: GroupFactory = open_group,
        bucket_bytes: int | None = None,
    ) -> None:
        """`dtype` is the engines' dtype; with `credentials`, a key folder, only its nodes may join.

        `bucket_bytes` replaces `weights.bucket_mib`, for buckets below one MiB.
        """
        self._incarnation, self._weights, self._credentials = incarnation, weights, credentials
        self._group_factory = group_factory
        self._bucket_bytes = bucket_bytes if bucket_bytes is not None else weights.bucket_mib << 20
        self._published, self._version = 0, -1
        self._deltas = Deltas(weights.encoding, weights.anchor_every)
        self._device = remember_device() if weights.buffers == "device" else None
        self._maker = SnapshotMaker(dtype, self._device)
        self._control: PublishControl | None = None
        self._thread: threading.Thread | None = None
        self._sealing: threading.Thread | None = None

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

    def share(self, parts: list[Named]) -> None:
        """Send the first of `parts` only, (name, shape) of tensors source by source; the others send theirs."""
        self._maker.share(parts, 0)
        self._plane.sources.count = len(parts) - 1

    @property
    def lead(self) -> Lead:
        """The address, incarnation and password that the other sources need."""
        return Lead(self._plane.address, self._incarnation, self._plane.password)

    def publish(self, version: int, named: Iterable[tuple[str, Tensor]], canary: Canary | None) -> int:
        """Copy `named` (Hugging Face name, full tensor) into the flat buffer, and send it in the background.

        Returns the size of the version in bytes; the parameters may change again. After `share` these are the tensors
        of the first part. It consumes `named` to its end, because every rank must take part in producing it.
        Without `weights.overlap` it also waits until the version is active on every node, at most `timeout_s`. Raises
        ValueError when names or shapes differ from the first version's.
        """
        if self._sealing is not None:
            self._sealing.join()  # versions are offered in order; hashing and encoding are far shorter than a step
        snapshot = self._maker.make(version, named, canary)
        self._sealing = threading.Thread(target=self._seal, args=(snapshot, self._plane), name="seal-weights")
        self._sealing.start()
        self._published, self._version = self._published + 1, version
        if not self._weights.overlap:
            timeout_s = self._weights.timeout_s
            if not self._plane.figures.wait_settled(self._published, version, timeout_s):
                logger.warning("version %d is not active on every node after %g s; continuing", version, timeout_s)
        return snapshot.layout.total_bytes

    def hold(self, reason: str) -> None:
        """Let the nodes keep the newest version that `publish` got so far, until `release(reason)`; see Targets.

        Call it from the thread that publishes. Several reasons may overlap.
        """
        self._plane.post(partial(self._plane.targets.hold, reason, self._version))

    def release(self, reason: str) -> None:
        """Send the newest version, unless another reason remains."""
        self._plane.post(partial(self._plane.targets.release, reason))

    def evaluate(self, *versions: int) -> None:
        """Keep a copy of each of these versions, and give the first one to the nodes of the pool.

        A version is the one that `publish` got last, or is in the list of the call before.
        """
        self._plane.post(partial(self._plane.targets.evaluate, versions))

    def stats(self) -> PublishStats:
        """Figures so far; cheap, callable from any thread."""
        return self._control.figures.now if self._control is not None else PublishStats()

    def close(self) -> None:
        """Stop sending and release the endpoint; a publish under way is finished or cut after the timeout."""
        if self._control is None or self._thread is None:
            return
        if self._sealing is not None:
            self._sealing.join()
        self._control.stop()
        self._thread.join(self._weights.timeout_s + 5)
        if self._thread.is_alive():
            logger.warning("the weight plane did not stop in time")

    def _seal(self, snapshot: Snapshot, control: PublishControl) -> None:
        try:
            with own_stream(self._device):
                self._deltas.seal(snapshot, self._bucket_bytes)
            control.offer(snapshot)
        except Exception as error:
            logger.exception("version %d cannot be sent", snapshot.version)
            control.figures.change(fatal=f"version {snapshot.version} cannot be sent: {error!r}", crashed=True)
