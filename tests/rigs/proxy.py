"""A TCP proxy between clients and a broker that can cut, delay, slow down and lose connections."""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

CHUNK = 16 << 10
LINE_CHUNKS = 64  # under way in one direction
LATE_S = 0.5  # so much is caught up with when a busy machine wakes the proxy late
LOOP_PASSES = 10  # more than asyncio needs from an accept or an abort to its callback


class Link:
    """One proxied connection."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client, self.server = client, server
        self.open = asyncio.Event()  # bytes pass
        self.open.set()
        self.lost = False  # stays silent for ever


class Proxy:
    """Forwards connections to a broker on a thread of its own; every method may be called from any thread."""

    def __init__(self, target: str, buffer_bytes: int | None = None) -> None:
        """`buffer_bytes`: of each socket in the kernel; None: some megabytes, which a sender sees acknowledged."""
        parts = urlsplit(target)
        assert parts.hostname is not None and parts.port is not None
        self._host, self._port = parts.hostname, parts.port
        self.to_server = self.to_client = 0  # bytes that were passed on
        self.accepted = 0  # connections so far
        self._buffer_bytes = buffer_bytes
        self.delay_s = 0.0  # from a byte's arrival to its departure, in each direction
        self.bytes_per_s: float | None = None  # rate of every connection in each direction; None: as fast as it goes
        self._holding = self._ending = False
        self._links: set[Link] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = self._call(self._listen())
        self.address = parts._replace(netloc=f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}").geturl()

    def cut(self) -> None:
        """Reset every connection; new ones are welcome."""
        self._do(lambda: [self._reset(link) for link in list(self._links)])

    def lead_to(self, port: int) -> None:
        """The address moves to another server of the machine: every connection is reset, new ones end there."""
        self._port = port
        self.cut()

    def hold(self) -> None:
        """A black hole: nothing passes on any connection, nothing is closed, until `release`."""

        self._hold(True)

    def release(self) -> None:
        """Delayed bytes pass; connections that were lost stay so."""

        self._hold(False)

    def _hold(self, holding: bool) -> None:
        def hold() -> None:
            self._holding = holding
            for link in self._links:
                if holding or link.lost:
                    link.open.clear()
                else:
                    link.open.set()

        self._do(hold)

    def lose(self) -> None:
        """Present connections never carry another byte and are never closed, as when a NAT forgets them."""

        def lose() -> None:
            for link in self._links:
                link.lost = True
                link.open.clear()

        self._do(lose)

    def half_close(self, to_server: bool) -> None:
        """End one direction of every connection; the other stays open."""

        def half_close() -> None:
            for link in self._links:
                with contextlib.suppress(OSError):
                    (link.server if to_server else link.client).write_eof()

        self._do(half_close)

    def close(self) -> None:
        """End everything."""
        self.cut()
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    # ---------------------------------------------------------------- inside the loop

    async def _listen(self) -> asyncio.Server:
        listener = self._sized(socket.socket())
        listener.bind(("127.0.0.1", 0))
        return await asyncio.start_server(self._accept, sock=listener)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        outgoing = self._sized(socket.socket())
        outgoing.setblocking(False)
        try:
            await self._loop.sock_connect(outgoing, (self._host, self._port))
        except BaseException:
            outgoing.close()
            raise
        return await asyncio.open_connection(sock=outgoing)

    def _sized(self, made: socket.socket) -> socket.socket:
        if self._buffer_bytes is not None:
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                made.setsockopt(socket.SOL_SOCKET, option, self._buffer_bytes)
        return made

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._ending:
            writer.transport.abort()
            return
        connecting = asyncio.ensure_future(self._connect())
        self._watch(connecting)
        try:
            server_reader, server_writer = await connecting
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()
            return
        link = Link(writer, server_writer)
        if self._holding:
            link.open.clear()
        self._links.add(link)
        self.accepted += 1
        for source, target in ((reader, server_writer), (server_reader, writer)):
            self._watch(asyncio.ensure_future(self._pump(link, source, target)))

    def _watch(self, task: asyncio.Task[Any]) -> None:
        """`close` ends the task."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pump(self, link: Link, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(LINE_CHUNKS)

        async def deliver() -> None:
            due = self._loop.time()
            while True:
                arrived, data = await line.get()
                await asyncio.sleep(max(0.0, arrived + self.delay_s - self._loop.time()))
                if self.bytes_per_s:
                    due = max(due, self._loop.time() - LATE_S) + len(data) / self.bytes_per_s
                    await asyncio.sleep(max(0.0, due - self._loop.time()))
                await link.open.wait()
                if not data:
                    return
                target.write(data)
                if target is link.server:
                    self.to_server += len(data)
                else:
                    self.to_client += len(data)
                await target.drain()

        async def collect() -> None:
            while data := await source.read(CHUNK):
                await line.put((self._loop.time(), data))
            await line.put((self._loop.time(), b""))

        ends = [asyncio.ensure_future(deliver()), asyncio.ensure_future(collect())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
        if not link.lost:
            self._reset(link)

    def _reset(self, link: Link) -> None:
        self._links.discard(link)
        link.open.set()
        for writer in (link.client, link.server):
            raw = writer.get_extra_info("socket")
            if raw is not None and raw.fileno() >= 0:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # RST, not FIN
            writer.transport.abort()

    async def _end(self) -> None:
        self._ending = True
        for listener in self._server.sockets:
            self._loop.remove_reader(listener.fileno())
        for _ in range(LOOP_PASSES):  # a connection that was just accepted comes to `_accept` a few passes later
            for link in list(self._links):
                self._reset(link)
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)
        self._server.close()  # only now: asyncio leaks a connection that was accepted just before

    # ---------------------------------------------------------------- from other threads

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def _do(self, action: Callable[[], Any]) -> None:
        async def run() -> None:
            action()

        self._call(run())
