"""Parts of a version from node to node over ZeroMQ: a server passes on what it has, while more of it arrives.

A client (DEALER) asks a server (ROUTER) for the pieces of a part by the part's name:

    client -> server  Get    asks for one piece
    server -> client  Piece  has it as a second frame, sealed as its source sealed it
    server -> client  Gone   it is not, or no longer, served here; with the reason

The server answers a connection's requests in their order, each when its piece is there. A part that the server has
not heard of yet is waited for: its node may hear of it a moment later. The client has at most WINDOW pieces under way,
which bounds every queue at both ends. Pieces are sealed (common/weights/wire/pieces.py), so a password is enough here.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import torch
import zmq

from common.process.local_address import needs_ipv6
from common.security.curve import give_password
from common.weights.wire.failures import Damaged, GivenUp, Late, Mismatch
from common.weights.wire.messages import Publish
from common.weights.wire.pieces import LARGEST, OPENED_AT_ONCE, TAG_BYTES, PartBuffer
from common.weights.wire.sockets import RouterSocket

logger = logging.getLogger(__name__)

WINDOW = 64  # pieces asked for and not yet received
WINDOW_BYTES = 8 << 20  # that these may have together; 8 pieces always may
APART_BYTES = 256 << 10  # a piece of so many bytes is opened in a thread of its own; smaller ones cost less than that
MOST_CLIENTS = 1024  # that wait, unless for a part that is served here
MAX_REQUEST_BYTES = 512
UNKNOWN_S = 5.0  # that a part is waited for
WITHDRAWN = 256  # names that are remembered
FULL_S = 0.005  # until a connection that has read too little is tried again
LOOK_S = 0.1  # a fetch notices within this time that it was closed or has another source
STALL_S = 1.25  # without a piece, after which a fetch says so

PartName = Annotated[str, msgspec.Meta(max_length=64)]
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Note = Callable[[], None]


class Get(msgspec.Struct, frozen=True):
    part: PartName
    number: Number


class Piece(msgspec.Struct, frozen=True, tag="piece"):
    number: Number


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    reason: str


encode = msgspec.msgpack.Encoder().encode
decode_get = msgspec.msgpack.Decoder(Get).decode
decode_answer = msgspec.msgpack.Decoder(Piece | Gone).decode


@dataclass
class OpenRequests:
    """A connection's requests that have no answer yet, the oldest first, and when that one came."""

    requests: deque[Get] = field(default_factory=lambda: deque[Get]())
    since: float = field(default_factory=time.monotonic)


class RelayServer:
    """Serves from a thread of its own; every method may be called from any thread."""

    def __init__(self, host: str, password: str = "") -> None:
        """Listen on a free port of `host`, for clients that know `password`; raises zmq.ZMQError."""
        self._buffers: dict[str, PartBuffer] = {}
        self._withdrawn = deque[str](maxlen=WITHDRAWN)
        self._lock = threading.Lock()
        self._clients: dict[bytes, OpenRequests] = {}
        self.host = host
        self.password = password
        self._router = RouterSocket(
            host,
            max_message_bytes=MAX_REQUEST_BYTES,
            waiting_messages=2 * WINDOW,
            unread_messages=2 * WINDOW,
            password=password,
        )
        self.address = self._router.address
        self._closing = False
        self._full = False  # a connection did not take its answer
        self._thread = threading.Thread(target=self._serve, daemon=True, name="relay-weights")
        self._thread.start()

    def offer(self, buffer: PartBuffer) -> None:
        """Serve its pieces as they arrive, until it is withdrawn."""
        buffer.watch(self._router.wake)
        with self._lock:
            self._buffers[buffer.part.name] = buffer
        self._router.wake()

    def withdraw(self, *buffers: PartBuffer) -> None:
        """Serve nothing more of these buffers, by default of any; on return their memory may be written again."""
        with self._lock:
            doomed = list(buffers or self._buffers.values())
            for buffer in doomed:
                name = buffer.part.name
                if self._buffers.get(name) is buffer:  # not that of another attempt
                    del self._buffers[name]
                    self._withdrawn.append(name)
        for buffer in doomed:
            buffer.close()
        self._router.wake()

    def close(self) -> None:
        self._closing = True
        self._router.wake()
        self._thread.join(5)

    def _serve(self) -> None:
        try:
            while not self._closing:
                look_s = FULL_S if self._full else UNKNOWN_S / 10  # without a request there is nothing to look at
                self._full = False
                self._router.wait(int(1000 * look_s) if self._clients else None)
                with contextlib.suppress(zmq.Again):
                    for _ in range(4 * WINDOW):
                        self._read(*self._router.receive())
                while any([self._answer(*waiting) for waiting in list(self._clients.items())]):
                    pass  # one answer to every client that can have one, until none can
        except Exception:
            logger.exception("the relay of weights stopped; nodes fetch elsewhere")
        finally:
            self._router.close()

    def _read(self, identity: zmq.Frame, *frames: zmq.Frame) -> None:
        connection = identity.bytes
        client = self._clients.get(connection)
        try:
            if len(frames) != 1:
                raise ValueError(f"{len(frames)} frames")
            get = decode_get(frames[0].buffer)
            if client is not None and len(client.requests) >= 2 * WINDOW:
                raise ValueError(f"{2 * WINDOW} requests wait here")
        except (ValueError, RecursionError) as error:
            self._refuse(connection, str(error))
            return
        if client is None:
            self._make_room()
            client = self._clients[connection] = OpenRequests()
        client.requests.append(get)

    def _make_room(self) -> None:
        """Beyond MOST_CLIENTS the one goes that has waited longest for a part that nothing is known of."""
        if len(self._clients) < MOST_CLIENTS:
            return
        unknown = (connection for connection, c in self._clients.items() if c.requests[0].part not in self._buffers)
        if (first := next(unknown, None)) is not None:
            self._refuse(first, f"{MOST_CLIENTS} connections wait here")

    def _answer(self, connection: bytes, client: OpenRequests) -> bool:
        """Whether the oldest request could be answered with its piece."""
        get = client.requests[0]
        with self._lock:
            buffer = self._buffers.get(get.part)
            withdrawn = get.part in self._withdrawn
        if buffer is None:
            if withdrawn or time.monotonic() > client.since + UNKNOWN_S:
                self._refuse(connection, "this version is not served here" + " any more" * withdrawn)
            return False
        if get.number >= buffer.count:
            self._refuse(connection, f"piece {get.number} of {buffer.count} cannot be asked for")
            return False
        piece = buffer.piece(get.number) if get.number < buffer.arrived else None
        if piece is None:
            return False  # it comes later, or was withdrawn in this moment
        try:
            self._router.send([connection, encode(Piece(get.number)), piece])
        except zmq.Again:
            self._full = True  # the client reads slowly; its pieces wait here
            return False
        except zmq.ZMQError as error:
            logger.debug("a client of the relay is gone: %s", error)
            del self._clients[connection]
            return False
        client.requests.popleft()
        client.since = time.monotonic()
        if not client.requests:
            del self._clients[connection]
        return True

    def _refuse(self, connection: bytes, reason: str) -> None:
        self._clients.pop(connection, None)
        try:
            self._router.send([connection, encode(Gone(reason))])
        except zmq.ZMQError as error:  # its own wait has a deadline
            logger.debug("a refusal was not sent: %s", error)


class Stall(msgspec.Struct, frozen=True):
    """A fetch that waits for another source than `source`, with `pieces` pieces here."""

    source: str
    pieces: int
    reason: str  # '' for silence


class Fetch:
    """Brings a buffer's pieces here, from one source after the other. `run` in one thread, the rest from any."""

    def __init__(self, buffer: PartBuffer, source: str, password: str = "", openers: Executor | None = None) -> None:
        """`openers` check and open large pieces; None: the thread of `run` does."""
        self._buffer = buffer
        self._source = source
        self._password = password
        self._openers = openers if buffer.part.piece_bytes >= APART_BYTES else None
        self._routes = 0  # how often it was rerouted
        self.stall: Stall | None = None  # it waits for another source
        self._closing = False

    def reroute(self, source: str) -> None:
        """Go on from `source`, also if that is the same: then with a new connection."""
        self._source = source
        self.stall = None
        self._routes += 1

    def close(self) -> None:
        """Let `run` end within LOOK_S."""
        self._closing = True

    def run(self, timeout_s: float, note: Note = lambda: None) -> None:
        """Return when every piece is there; calls `note` after pieces. Raises GivenUp when closed, and Late."""
        deadline = time.monotonic() + timeout_s
        buffer = self._buffer
        while buffer.arrived < buffer.count:
            route = self._routes
            made = SourceConnection(self._source, buffer, self._password, self._openers)
            with contextlib.closing(made) as connection:
                self._follow(connection, route, timeout_s, deadline, note)

    def _follow(
        self, connection: "SourceConnection", route: int, timeout_s: float, deadline: float, note: Note
    ) -> None:
        """Take pieces in until all are there or there is another source."""
        buffer = self._buffer
        source = connection.address
        heard = time.monotonic()
        failed = ""
        while buffer.arrived < buffer.count and self._routes == route:
            now = time.monotonic()
            if self._closing:
                raise GivenUp("the transfer was given up")
            if now > deadline:
                came = f"{buffer.arrived} of {buffer.count} pieces came within {timeout_s:g} s"
                raise Late(f"{came}, at last from {source}: {failed or 'silence'}")
            try:
                if failed:
                    time.sleep(LOOK_S)
                elif connection.take(LOOK_S):
                    heard = now
                    note()
            except (ValueError, Damaged, zmq.ZMQError) as error:
                failed = str(error)
            if self._routes == route:
                stands_still = failed or now - heard > STALL_S
                self.stall = Stall(source, buffer.arrived, failed) if stands_still else None


class SourceConnection:
    """To one source, for the pieces from the first that is not there."""

    def __init__(self, address: str, into: PartBuffer, password: str, openers: Executor | None) -> None:
        self.address = address
        self._buffer = into
        self._openers = openers
        self._asked = into.arrived
        self._next = into.arrived  # the piece that comes next
        self._opening = deque[Future[None]]()  # pieces that came, the oldest first
        self._window = min(WINDOW, max(8, WINDOW_BYTES // into.part.piece_bytes))
        # One context, and thread, for all sources.
        self._socket = zmq.Context[zmq.Socket[bytes]].instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 2 * WINDOW)
        self._socket.setsockopt(zmq.SNDHWM, 2 * WINDOW)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST + TAG_BYTES)
        self._socket.setsockopt(zmq.IPV6, int(needs_ipv6(address)))
        give_password(self._socket, password)
        self._connected = False

    def take(self, timeout_s: float) -> bool:
        """Take in what has come, or comes in time; False if nothing. Raises ValueError, Damaged or zmq.ZMQError."""
        if not self._connected:
            self._socket.connect(self.address)
            self._connected = True
        all_came = self._next == self._buffer.count
        while self._opening and (all_came or len(self._opening) > OPENED_AT_ONCE or self._opening[0].done()):
            self._opening.popleft().result()
        if all_came:
            return True
        self._ask()
        if not self._socket.poll(int(1000 * timeout_s)):
            return False
        frames = self._socket.recv_multipart(copy=False)
        answer = decode_answer(frames[0].buffer)
        if isinstance(answer, Gone):
            raise ValueError(answer.reason or "refused")
        if answer.number != self._next or len(frames) != 2:
            what = f"{len(frames) - 1} pieces as piece {answer.number}"
            raise ValueError(f"{self.address} sent {what}, not piece {self._next}")
        if self._openers is None:
            self._buffer.take_in(self._next, frames[1])
        else:
            self._opening.append(self._openers.submit(self._buffer.take_in, self._next, frames[1]))
        self._next += 1
        return True

    def _ask(self) -> None:
        buffer = self._buffer
        with contextlib.suppress(zmq.Again):
            while self._asked < min(self._next + self._window, buffer.count):
                self._socket.send(encode(Get(buffer.part.name, self._asked)), zmq.NOBLOCK)
                self._asked += 1

    def close(self) -> None:
        wait(self._opening)  # the next connection brings pieces that are not there then
        self._socket.close(linger=0)


class PartFetches:
    """Fetches all parts of one publish at once, each from a source of its own. `run` in one thread, the rest in any."""

    def __init__(self, publish: Publish, password: str) -> None:
        self._publish = publish
        self._password = password
        self._lock = threading.Lock()
        self._fetches: list[Fetch] = []
        self._sources = list(publish.sources)
        self._closed = False

    @property
    def stalls(self) -> dict[int, Stall]:
        """The parts that wait for another source."""
        return {number: stall for number, fetch in enumerate(self._fetches) if (stall := fetch.stall) is not None}

    def run(self, payload: torch.Tensor, server: RelayServer | None, note_share: Callable[[float], None]) -> None:
        """Every part into `payload` [n] uint8, while `server` lets other nodes fetch what is here already.

        `note_share` is called with the share that arrived, 0 to 1. Raises Mismatch when the parts are not the payload,
        GivenUp when it was closed, and Late when it did not arrive in time.
        """
        check_parts(self._publish, payload.numel())
        buffers = [PartBuffer(part, payload, arrived=0) for part in self._publish.parts]
        openers = ThreadPoolExecutor(OPENED_AT_ONCE, "open-weights")
        with self._lock:
            if self._closed:
                raise GivenUp("given up for another transfer")
            pairs = zip(buffers, self._sources, strict=True)
            self._fetches = [Fetch(buffer, source, self._password, openers) for buffer, source in pairs]
            if server is not None:
                for buffer in buffers:
                    server.offer(buffer)

        def note() -> None:
            note_share(sum(buffer.arrived_bytes for buffer in buffers) / max(payload.numel(), 1))

        def fetch(one: Fetch) -> None:
            try:
                one.run(self._publish.timeout_s, note)
            except BaseException:
                self.close()  # the rest alone is of no use
                raise

        with openers, ThreadPoolExecutor(len(buffers), "fetch-weights") as pool:
            running = [pool.submit(fetch, one) for one in self._fetches]
        failures = [error for one in running if (error := one.exception()) is not None]
        if failures:
            if server is not None:
                server.withdraw(*buffers)
            raise next((error for error in failures if not isinstance(error, GivenUp)), failures[0])

    def reroute(self, part: int, source: str) -> None:
        """Fetch the rest of a part from `source`; a part that the publish does not have is ignored."""
        with self._lock:
            if part < len(self._sources):
                self._sources[part] = source
            if part < len(self._fetches):
                self._fetches[part].reroute(source)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for fetch in self._fetches:
                fetch.close()


def check_parts(publish: Publish, size: int) -> None:
    """Raises Mismatch when the parts of `publish` are not the `size` bytes of its payload, each of them once."""
    parts = sorted(publish.parts, key=lambda part: part.start)
    ends = [part.start + part.size for part in parts]
    if len(parts) != len(publish.sources) or [p.start for p in parts] != [0, *ends[:-1]] or ends[-1:] != [size]:
        raise Mismatch(f"version {publish.version} comes in parts that are not its {size} bytes")
