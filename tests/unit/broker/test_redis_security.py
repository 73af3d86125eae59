"""Users and passwords, TLS, and what each role may do, against a real server."""

import asyncio
import datetime
import gc
import ipaddress
import logging
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from broker.connect import Access, connect, connect_node
from broker.contract import LearnerReport, NodeReport, RunInfo
from broker.redis.acl import COMMANDS, AclRole, acl_line
from broker.redis.endpoint import endpoint
from broker.redis.link import Link
from broker.redis.run_store import RunStore, new_store
from common.errors import BrokerError, BrokerUnreachable, UsageError
from common.redis_address import with_run
from common.rollouts import GroupMeta, Task
from tests.redis_server import RedisServer

RUN = RunInfo("acl run", "/nowhere", 2, 1, 2, 30.0, 1 << 30)
META = GroupMeta(0, 0, 0.5, 3)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    started = RedisServer(tmp_path)
    yield started
    started.stop()


@pytest.fixture
def guarded(server: RedisServer, tmp_path: Path) -> tuple[RedisServer, Path]:
    """A server with the documented users and nobody else, and the folder of their passwords."""
    folder = tmp_path / "credentials"
    folder.mkdir()
    for role in COMMANDS:
        password = f"{role}-secret"
        (folder / f"{role}.password").write_text(password + "\n")
        assert server.ask("ACL", "SETUSER", *acl_line(role, RUN.name, password).split()) == b"OK"
    assert server.ask("ACL", "SETUSER", "default", "off") == b"OK"
    return server, folder


def play_a_step(address: str, credentials: str) -> None:
    """Everything that the roles do, from the keeper's first look to the observer's last."""
    link = Link(endpoint(address, "broker", credentials), "broker", 10)
    RunStore(link, RUN, 4, os.getpid(), 10).enter(new_store())
    link.close()
    access = Access(address=address, role="learner", credentials=credentials, deadline_s=5)

    async def node() -> None:
        async with connect_node(msgspec.structs.replace(access, role="node")) as client:
            await client.register(NodeReport("n0", 1, "h", "generating", 0))
            leases = await client.lease("n0", 0, 4, 5)
            await client.fail("n0", leases[3].token, "why", 1, 0.5)
            await client.release("n0", [leases[2].token])
            await client.heartbeat(NodeReport("n0", 1, "h", "generating", 0), [leases[0].token])
            for lease in leases[:2]:
                assert await client.complete("n0", lease.token, META, b"payload")
            assert not await client.complete("n0", leases[3].token, META, b"late")
            await client.leave("n0")

    with connect(access) as learner:
        learner.attach(LearnerReport(1, 1, "training", 0, instance="i"))
        learner.offer([Task(n, b"{}", n, 1) for n in range(4)])
        asyncio.run(node())
        taken = learner.take(0, 2, 5.0)
        assert taken is not None and [g.payload for g in taken] == [b"payload"] * 2
        assert learner.take(1, 2, 0.1) is None
        learner.filter(0, [1], 1)
        learner.regenerate(0, [0])
        learner.commit(0)
        learner.report(LearnerReport(1, 1, "done", 1, instance="i"))
        assert learner.status().groups_committed == 1
    with connect(msgspec.structs.replace(access, role="observer")) as observer:
        assert observer.status().groups_committed == 1
        assert [e.state for e in observer.ledger()] == ["pending", "committed", "pending", "pending"]
        assert "commit" in [e.kind for e in observer.events(-1)]


def test_every_role_gets_by_with_its_acl_line(guarded: tuple[RedisServer, Path]) -> None:
    server, folder = guarded
    play_a_step(with_run(server.address, RUN.name), str(folder))


@pytest.mark.parametrize("role", sorted(COMMANDS))
def test_the_documented_line_is_the_one_that_is_tested(role: AclRole) -> None:
    page = (Path(__file__).parents[3] / "docs" / "redis.md").read_text()
    assert f"user {acl_line(role, 'NAME', 'PASSWORD')}\n" in page


@pytest.mark.parametrize("role", sorted(COMMANDS))
def test_no_role_reaches_other_runs_or_administration(guarded: tuple[RedisServer, Path], role: str) -> None:
    server, folder = guarded
    link = Link(endpoint(server.address, role, str(folder)), role, 10)
    for command in (
        ("GET", "slipstream:{other}:run"),
        ("FLUSHALL",),
        ("CONFIG", "SET", "appendonly", "no"),
        ("KEYS", "*"),
        ("ACL", "LIST"),
        ("SCRIPT", "FLUSH"),
    ):
        with pytest.raises(BrokerError, match=f"does not permit what the role {role} needs"):
            link.run(lambda repeated, whole, command=command: [command], 0)
    link.close()


def test_an_observer_cannot_write(guarded: tuple[RedisServer, Path]) -> None:
    server, folder = guarded
    link = Link(endpoint(server.address, "observer", str(folder)), "observer", 10)
    for command in (("SET", "slipstream:{acl%20run}:run", "x"), ("EVAL", "return 1", 0)):
        with pytest.raises(BrokerError, match="does not permit"):
            link.run(lambda repeated, whole, command=command: [command], 0)
    link.close()


def test_a_wrong_password_is_said_at_once_and_never_shown(
    guarded: tuple[RedisServer, Path], caplog: pytest.LogCaptureFixture
) -> None:
    server, folder = guarded
    (folder / "learner.password").write_text("not-the-secret")
    caplog.set_level(logging.DEBUG)
    with (
        connect(Access(address=with_run(server.address, "r"), role="learner", credentials=str(folder))) as client,
        pytest.raises(BrokerError, match=r"does not let the role learner in .*learner\.password") as caught,
    ):
        client.attach(LearnerReport(1, 1, "training", 0))
    assert "not-the-secret" not in str(caught.value) + caplog.text + repr(
        endpoint(server.address, "learner", str(folder))
    )


def test_a_permission_that_a_move_lacks_is_said_as_such(guarded: tuple[RedisServer, Path]) -> None:
    server, folder = guarded
    address = with_run(server.address, RUN.name)
    play_a_step(address, str(folder))
    link = Link(endpoint(address, "broker", str(folder)), "broker", 10)
    with pytest.raises(BrokerError, match="does not permit what the role broker needs"):
        link.run(lambda repeated, whole: [("EVAL", "return redis.call('LLEN', KEYS[1])", 1, "slipstream:runs")], 0)
    link.close()


def test_without_a_password_a_guarded_server_says_what_is_missing(guarded: tuple[RedisServer, Path]) -> None:
    with (
        connect(Access(address=with_run(guarded[0].address, "r"), role="learner")) as client,
        pytest.raises(BrokerError, match=r"broker\.credentials"),
    ):
        client.status()


def test_an_observer_makes_do_with_another_roles_password(tmp_path: Path) -> None:
    (tmp_path / "node.password").write_text("p")
    (tmp_path / "node.user").write_text("someone")
    found = endpoint("redis://127.0.0.1", "observer", str(tmp_path))
    assert (found.user, found.password) == ("someone", "p")


@pytest.mark.parametrize(
    ("address", "password", "word"),
    [
        ("redis://10.0.0.4:6379/0", True, "without TLS"),
        ("rediss://10.0.0.4:6379/0", False, "without a password"),
    ],
)
def test_beyond_this_machine_a_client_wants_tls_and_a_password(
    tmp_path: Path, address: str, password: bool, word: str
) -> None:
    if password:
        (tmp_path / "node.password").write_text("p")
    with pytest.raises(UsageError, match=word):
        endpoint(address, "node", str(tmp_path))


def test_a_client_certificate_without_its_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "client.crt").write_text("x")
    with pytest.raises(UsageError, match=r"client\.crt and client\.key"):
        endpoint("rediss://127.0.0.1", "node", str(tmp_path))


# ---------------------------------------------------------------- TLS


class TlsFront:
    """Ends TLS in front of a server that has none: asks every client for a certificate of the same authority."""

    def __init__(self, target_port: int, folder: Path) -> None:
        self._target_port = target_port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(folder / "server.crt", folder / "server.key")
        self._context.load_verify_locations(folder / "ca.crt")
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            try:
                secure = self._context.wrap_socket(client, server_side=True)
            except OSError:
                return  # no certificate, or not TLS
            with secure, socket.create_connection(("127.0.0.1", self._target_port)) as server:
                back = threading.Thread(target=_copy, args=(server, secure), daemon=True)
                back.start()
                _copy(secure, server)
                back.join(5)


def _copy(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def write_certificates(folder: Path) -> None:
    """ca.crt, and server and client certificates that it signed, with their keys."""
    ca_key, ca_name = ec.generate_private_key(ec.SECP256R1()), named("authority")
    sign(folder, "ca", ca_key, ca_name, ca_name, ca_key, x509.BasicConstraints(ca=True, path_length=0))
    for name in ("server", "client"):
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        sign(folder, name, ec.generate_private_key(ec.SECP256R1()), named(name), ca_name, ca_key, address)


def named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def sign(
    folder: Path,
    file: str,
    key: ec.EllipticCurvePrivateKey,
    name: x509.Name,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    extension: x509.ExtensionType,
) -> None:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).add_extension(extension, critical=True)
    builder = builder.not_valid_before(now - datetime.timedelta(days=1))
    signed = builder.not_valid_after(now + datetime.timedelta(days=1)).sign(issuer_key, hashes.SHA256())
    (folder / f"{file}.crt").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / f"{file}.key").write_bytes(secret)


@pytest.fixture
def front(guarded: tuple[RedisServer, Path]) -> Iterator[tuple[TlsFront, Path]]:
    server, folder = guarded
    write_certificates(folder)
    started = TlsFront(server.port, folder)
    yield started, folder
    started.close()


def test_a_whole_step_over_tls_with_certificates_on_both_sides(front: tuple[TlsFront, Path]) -> None:
    play_a_step(with_run(f"rediss://127.0.0.1:{front[0].port}/0", RUN.name), str(front[1]))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # redis-py leaves such sockets open
def test_a_server_whose_certificate_nobody_vouches_for_is_not_spoken_to(front: tuple[TlsFront, Path]) -> None:
    (front[1] / "ca.crt").unlink()
    access = Access(
        address=f"rediss://127.0.0.1:{front[0].port}/0", role="observer", credentials=str(front[1]), deadline_s=1
    )
    with connect(access) as client, pytest.raises(BrokerUnreachable, match=r"(?i)certificate verify failed"):
        client.status()
    gc.collect()  # here, not under another test


def test_a_plain_client_does_not_get_through_a_tls_port(front: tuple[TlsFront, Path]) -> None:
    access = Access(address=f"redis://127.0.0.1:{front[0].port}/0", role="observer", deadline_s=1)
    with connect(access) as client, pytest.raises(BrokerUnreachable, match="does not answer"):
        client.status()
