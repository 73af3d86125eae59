"""`slipstream keys DIR`: the key folder of a job whose sockets are authenticated. See common/security/credentials.py.

It only ever adds: existing keys stay, so a running job continues. A running broker lets a new credential in at once.
`--revoke NAME` takes one back.
"""

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

import zmq

from common.errors import UsageError
from common.hub import absolute
from common.process.files import pretty_json
from common.process.run_dir import write_atomic
from common.security import credentials
from common.security.credentials import Credential, Identity, KeyFolder, Keys, Role, load_allowed, read_file
from common.security.curve import new_keys

DEFAULT_NODE = "node-0"


def command(args: argparse.Namespace) -> int:
    if not zmq.has("curve"):
        raise UsageError("this ZeroMQ was built without CURVE; install the pyzmq wheel of PyPI")
    folder = KeyFolder(Path(absolute("DIR", args.dir)))
    if args.revoke:
        for name in args.revoke:
            revoke(folder, name)
            print(f"revoked {name}; its connections are refused from now on")
        return 0
    names = [*(f"node-{i}" for i in range(args.nodes)), *args.node]
    made = make(folder, names or [DEFAULT_NODE])
    print(*(f"made {file}\n" for file in made), sep="", end="")
    print(f"{folder.path}: {len(load_allowed(folder.path))} keys are let in; {len(made)} are new")
    print(f"set broker.credentials: {folder.path}; a node's machine needs its nodes/NAME.json and nothing else")
    return 0


def make(folder: KeyFolder, nodes: Sequence[str]) -> list[Path]:
    """Make what is missing: server keys, learner, observer and the named nodes. Returns the credential files made.

    A name that is in the list without a file here was handed out and is left alone. Raises UsageError.
    """
    for name in nodes:
        if not re.match(credentials.CREDENTIAL_NAME, name):
            raise UsageError(f"--node {name!r}: expected letters, digits, '.', '_' and '-', at most 64")
    try:
        folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.nodes.mkdir(exist_ok=True, mode=0o700)
        if not folder.server.exists():
            if folder.allowed.exists():
                hint = "put it back, or use a new folder"
                raise UsageError(f"{folder.server} is missing beside {folder.allowed}; {hint}")
            _write_new(folder.server, new_keys())
        server = read_file(folder.server, Keys, "the broker's key pair")
        allowed = list(load_allowed(folder.path).values()) if folder.allowed.exists() else []
        wanted: list[tuple[Role, str, Path]] = [("learner", "learner", folder.learner)]
        wanted.append(("observer", "observer", folder.observer))
        for name in dict.fromkeys(nodes):
            wanted.append(("node", name, folder.nodes / f"{name}.json"))
        made: list[Path] = []
        for role, name, file in wanted:
            if not any((identity.role, identity.name) == (role, name) for identity in allowed):
                allowed.append(_credential(server, allowed, role, name, file))
                made.append(file)
        broker = Identity(server.public, "broker", "broker")  # it asks another broker of its run for signs
        allowed += [broker] * (broker not in allowed)
        if made or not folder.allowed.exists():
            _write_allowed(folder, allowed)
        return made
    except OSError as error:
        raise UsageError(f"{folder.path}: cannot make keys there: {error.strerror or error}") from error


def revoke(folder: KeyFolder, name: str) -> None:
    """Take the credential of a node out of the list, and its file away; raises UsageError when there is none."""
    allowed = load_allowed(folder.path).values()
    kept = [identity for identity in allowed if (identity.role, identity.name) != ("node", name)]
    if len(kept) == len(allowed):
        known = ", ".join(i.name for i in allowed if i.role == "node") or "none"
        raise UsageError(f"--revoke {name}: {folder.allowed} lists no node of that name (nodes: {known})")
    (folder.nodes / f"{name}.json").unlink(missing_ok=True)
    _write_allowed(folder, kept)


def _credential(server: Keys, allowed: list[Identity], role: Role, name: str, file: Path) -> Identity:
    """The identity in the credential's file, which is made when it is missing; `allowed` has the learner's first."""
    if not file.exists():
        keys = new_keys()
        learner = keys.public if role == "learner" else next(i.public for i in allowed if i.role == "learner")
        _write_new(file, Credential(role, name, keys.public, keys.secret, server.public, learner))
    found = read_file(file, Credential, f"the credential of {role} {name}")  # its list was lost in a crash
    return Identity(found.public, role, name)


def _write_allowed(folder: KeyFolder, keys: Sequence[Identity]) -> None:
    write_atomic(folder.allowed, pretty_json(credentials.AllowedKeys(list(keys))), mode=0o600)


def _write_new(file: Path, value: Keys | Credential) -> None:
    """Complete and durable before it has its name, and never in place of another."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    write_atomic(temporary, pretty_json(value), mode=0o600)
    try:
        os.link(temporary, file)
    finally:
        temporary.unlink()
