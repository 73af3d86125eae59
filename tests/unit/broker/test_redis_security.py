"""TLS with certificates on both sides between broker and Redis, and a Redis user without the run's keys."""

import datetime
import gc
import ipaddress
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from broker.journal.leader_election import LeaderElection
from broker.journal.redis_server import check_server, open_client
from broker.journal.store import StoreUnavailable
from common.errors import BrokerError, UsageError
from tests.rigs.brokers import job
from tests.rigs.redis_servers import RedisServer, acl_line, durable_redis
from tests.rigs.refusals import refused

Key = ec.EllipticCurvePrivateKey
LEADER = "tcp://127.0.0.1:1"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server with one user: the documented one, for the run NAME."""
    started = durable_redis(tmp_path / "server")
    started.ask("ACL", "SETUSER", *acl_line("NAME", "secret").split())
    started.ask("ACL", "SETUSER", "default", "off")
    yield started
    started.kill()


@pytest.fixture
def credentials(tmp_path: Path) -> Path:
    folder = tmp_path / "credentials"
    folder.mkdir()
    (folder / "broker.password").write_text("secret\n")
    return folder


def leading(run: str, redis: str, credentials: Path, run_dir: Path) -> LeaderElection:
    return LeaderElection(job(run_dir, name=run, store="redis", redis=redis, credentials=str(credentials)), "/run")


@pytest.mark.parametrize("password", ["", "wrong-one"])
def test_a_server_that_refuses_the_password_is_named_and_the_password_is_not(
    server: RedisServer, tmp_path: Path, password: str
) -> None:
    if password:
        (tmp_path / "broker.password").write_text(password)
    with refused(BrokerError, "broker.password") as error:
        check_server(open_client(server.address, str(tmp_path)), server.address, "fsync")
    assert "wrong-one" not in str(error.value)


@pytest.mark.parametrize(
    ("address", "file", "facts"),
    [
        ("redis://10.0.0.4:6379/0", "broker.password", ["broker.redis", "rediss://"]),
        ("rediss://10.0.0.4:6379/0", "notes", ["broker.redis", "broker.password"]),
        ("rediss://127.0.0.1", "client.crt", ["broker.credentials", "client.key"]),
    ],
)
def test_beyond_this_machine_the_broker_needs_tls_and_a_password_and_a_certificate_needs_its_key(
    tmp_path: Path, address: str, file: str, facts: list[str]
) -> None:
    (tmp_path / file).write_text("x")
    with refused(UsageError, *facts):
        open_client(address, str(tmp_path))


# ---------------------------------------------------------------- TLS


def test_with_tls_the_server_must_have_a_certificate_of_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "broker.password").write_text("secret")
    (tmp_path / "ca.crt").write_text("x")
    pool = open_client("rediss://redis.example:6380/1", str(tmp_path)).connection_pool
    assert pool.connection_class is redis.SSLConnection
    options = {"ssl_cert_reqs": "required", "ssl_check_hostname": True, "ssl_ca_certs": str(tmp_path / "ca.crt")}
    assert pool.connection_kwargs.items() >= options.items()


class TlsFront(socketserver.ThreadingTCPServer):
    """Ends TLS in front of a server that has none: asks every client for a certificate of the same authority."""

    daemon_threads = True

    def __init__(self, target_port: int, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self._target_port = target_port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(folder / "server.crt", folder / "server.key")
        self._context.load_verify_locations(folder / "ca.crt")
        self._context.verify_mode = ssl.CERT_REQUIRED
        self.address = f"rediss://127.0.0.1:{self.server_address[1]}/0"

    def finish_request(self, request: Any, client_address: Any) -> None:
        try:
            secure = self._context.wrap_socket(request, server_side=True)
        except OSError:
            return  # no certificate, or not TLS
        with secure, socket.create_connection(("127.0.0.1", self._target_port)) as server:
            back = threading.Thread(target=_copy, args=(server, secure), daemon=True)
            back.start()
            _copy(secure, server)
            back.join()


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
    sign(folder / "ca", ca_key, ca_name, ca_key, x509.BasicConstraints(ca=True, path_length=0))
    for name in ("server", "client"):
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        sign(folder / name, ec.generate_private_key(ec.SECP256R1()), named(name), ca_key, address)


def named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def sign(file: Path, key: Key, name: x509.Name, issuer_key: Key, extension: x509.ExtensionType) -> None:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(named("authority")).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).add_extension(extension, critical=True)
    builder = builder.not_valid_before(now - datetime.timedelta(days=1))
    signed = builder.not_valid_after(now + datetime.timedelta(days=1)).sign(issuer_key, hashes.SHA256())
    file.with_suffix(".crt").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    file.with_suffix(".key").write_bytes(key.private_bytes(pem, pkcs8, serialization.NoEncryption()))


@pytest.fixture
def front(server: RedisServer, credentials: Path) -> Iterator[TlsFront]:
    write_certificates(credentials)
    with TlsFront(server.port, credentials) as started:
        threading.Thread(target=started.serve_forever, daemon=True).start()
        yield started
        started.shutdown()


def test_a_broker_leads_and_writes_over_tls_with_certificates_on_both_sides(
    front: TlsFront, credentials: Path, tmp_path: Path
) -> None:
    first = leading("NAME", front.address, credentials, tmp_path)
    first.await_server()
    assert first.take(LEADER) is None
    first.open()
    first.term.resign()
    second = leading("NAME", front.address, credentials, tmp_path)
    assert second.take(LEADER) is None
    assert second.pointer.term == 1, "the first broker's term was kept"
    second.term.resign()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # redis-py leaves such sockets open
@pytest.mark.parametrize("missing", ["ca.crt", "client", "TLS"])
def test_without_authority_client_certificate_or_tls_nothing_is_sent(
    front: TlsFront, credentials: Path, missing: str
) -> None:
    for file in credentials.glob(f"{missing}*"):
        file.unlink()
    with refused(StoreUnavailable, "CERTIFICATE_VERIFY_FAILED" if missing == "ca.crt" else front.address):
        address = front.address.replace("rediss", "redis") if missing == "TLS" else front.address
        check_server(open_client(address, str(credentials)), front.address, "fsync")
    gc.collect()  # here, not under another test
