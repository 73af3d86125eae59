"""Key folders of `slipstream keys DIR`: the CURVE keys of the broker and of everyone who may connect to it.

    DIR/server.json        the broker's key pair; only on the broker's machine
    DIR/allowed.json       public keys that the broker and the weight plane let in, each with a role and a name
    DIR/learner.json       what the learner needs: its key pair and the broker's public key
    DIR/observer.json      the same for status, top, ledger and logs
    DIR/nodes/NAME.json    the same for a rollout node; all that the machine of a node needs

Keys are Z85 text, 40 characters for 32 bytes. Files are JSON, and only their owner may read them.
"""

import contextlib
import logging
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from common.errors import UsageError

logger = logging.getLogger(__name__)

KEY = "broker.credentials"
REDIS_PASSWORD = "broker.password"
MAKE = "`slipstream keys DIR` makes a folder of keys"
CREDENTIAL_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z"

Z85 = Annotated[str, Meta(pattern=r"^[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}$")]
Role = Literal["learner", "observer", "node", "broker"]


class Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key pair; that of the broker is DIR/server.json."""

    public: Z85
    secret: Z85


class Credential(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One client's file: its own key pair, and the public keys of the servers that it connects to."""

    role: Role
    name: Annotated[str, Meta(pattern=CREDENTIAL_NAME)]
    public: Z85
    secret: Z85
    server_public: Z85
    learner_public: Z85  # the weight plane's control socket proves this key


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A public key that is let in, with the role and the name of its owner."""

    public: Z85
    role: Role
    name: Annotated[str, Meta(pattern=CREDENTIAL_NAME)]


class AllowedKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """DIR/allowed.json."""

    keys: list[Identity]


class KeyFolder:
    """Paths below DIR, or the one file of a credential."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.server = self.path / "server.json"
        self.allowed = self.path / "allowed.json"
        self.learner = self.path / "learner.json"
        self.observer = self.path / "observer.json"
        self.nodes = self.path / "nodes"

    def node_files(self) -> list[Path]:
        return sorted(self.nodes.glob("*.json"))

    def client_files(self) -> list[Path]:
        return [file for file in (self.learner, self.observer, *self.node_files()) if file.exists()]


T = TypeVar("T")


def read_file(file: Path, kind: type[T], what: str) -> T:
    """Decode one file of a key folder; raises UsageError with the file, the expectation and the remedy."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{KEY}: {file} does not exist; expected {what}; {MAKE}") from None
    except OSError as error:
        raise UsageError(f"{KEY}: {file} cannot be read: {error.strerror or error}; expected {what}") from None
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # the error names a field, never a key's value
        raise UsageError(f"{KEY}: {file}: expected {what}, found something else ({error}); {MAKE}") from None


def load_server(path: str | Path) -> Keys:
    """The broker's own keys; raises UsageError."""
    folder = _folder(path, "the broker")
    _warn_if_open(folder.server)
    return read_file(folder.server, Keys, "the broker's key pair")


def load_allowed(path: str | Path) -> dict[str, Identity]:
    """Everyone who may connect to the broker, by public key; raises UsageError."""
    folder = _folder(path, "the list of allowed keys")
    listed = read_file(folder.allowed, AllowedKeys, "the list of allowed public keys")
    return {identity.public: identity for identity in listed.keys}


def load_credential(path: str | Path, role: Role, name: str = "") -> Credential:
    """A client's keys, from a key folder or from the file of one credential. Raises UsageError, naming the file.

    An observer may use any credential, because every role may ask for the status. A broker that asks another broker
    uses the server's key pair. A node uses the file of its `name` if there is one, else the first.
    """
    if role == "broker":
        keys = load_server(path)
        return Credential(role, role, keys.public, keys.secret, keys.public, keys.public)
    if not Path(path).exists():
        expected = "expected a key folder or a credential's file"
        raise UsageError(f"{KEY}: {expected}, found {path}, which does not exist; {MAKE}")
    file = _credential_file(Path(path), role, name)
    _warn_if_open(file)
    found = read_file(file, Credential, f"the credential of {_a(role)}")
    if found.role != role and role != "observer":
        differs = f"is the credential of {_a(found.role)}, expected that of {_a(role)}"
        hint = "every role has a file of its own in the folder of `slipstream keys`"
        raise UsageError(f"{KEY}: {file} {differs}; {hint}")
    return found


def belongs_to(node_id: str, credential: str) -> bool:
    """Whether the credential of this name may speak for a node: for NAME itself, and for NAME:ANYTHING."""
    return node_id.partition(":")[0] == credential


def own_node_id(credentials: str | None, node_id: str) -> str:
    """`node_id` where its credential may speak for it or there are no keys, else NAME:ID. Raises as `load_credential`.

    `credentials` is broker.credentials.
    """
    keys = curve_credentials(credentials)
    if keys is None:
        return node_id
    name = load_credential(keys, "node", node_id).name
    return node_id if belongs_to(node_id, name) else f"{name}:{node_id}"


def curve_credentials(path: str | None) -> str | None:
    """broker.credentials for a ZeroMQ socket; None when it is unset, or has only the broker's password for Redis."""
    if path is None or Path(path).is_file():
        return path
    folder = KeyFolder(path)
    has_keys = folder.client_files() or folder.server.exists()
    return None if (Path(path) / REDIS_PASSWORD).exists() and not has_keys else path


def check_credentials(path: str) -> str | None:
    """The problem with the value of broker.credentials for every role, without the key's name; None: it is fine.

    A folder with nothing but the broker's password for Redis is right while the broker listens on loopback.
    """
    place, folder = Path(path), KeyFolder(path)
    try:
        if not place.exists():
            return f"{path}, which does not exist"
        files = [place] if place.is_file() else folder.client_files()
        for file in files:
            read_file(file, Credential, "a credential")
        if folder.allowed.exists():
            load_allowed(path)
        if not (files or folder.server.exists() or (place / REDIS_PASSWORD).exists()):
            return f"{path}, which has no keys"
    except (UsageError, OSError) as error:
        return str(error).removeprefix(f"{KEY}: ")
    return None


def _folder(path: str | Path, whose: str) -> KeyFolder:
    if Path(path).is_file():
        raise UsageError(f"{KEY}: {path} is a file; {whose} needs the folder of `slipstream keys`")
    return KeyFolder(path)


def _credential_file(path: Path, role: Role, name: str) -> Path:
    if path.is_file():
        return path
    folder = KeyFolder(path)
    if role == "learner":
        return folder.learner
    nodes = folder.node_files()
    if role == "observer":
        return next((f for f in (folder.observer, folder.learner, *nodes) if f.exists()), folder.observer)
    if not nodes:
        raise UsageError(f"{KEY}: {folder.nodes} has no credential of a node; `slipstream keys DIR --node NAME`")
    own = folder.nodes / f"{name}.json"
    return own if own in nodes else nodes[0]


def _warn_if_open(file: Path) -> None:
    with contextlib.suppress(OSError):  # reading it says why
        if (mode := file.stat().st_mode) & 0o077:
            what = "%s: %s can be read by others than its owner (mode %o); chmod 600 it"
            logger.warning(what, KEY, file, mode & 0o777)


def _a(role: str) -> str:
    return f"an {role}" if role == "observer" else f"a {role}"
