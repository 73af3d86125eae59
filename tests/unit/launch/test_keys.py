"""`slipstream keys DIR`: what it makes, what it never touches, and what is said about a folder that cannot be used."""

import logging
import stat
from pathlib import Path

import msgspec
import pytest

from common.errors import UsageError
from common.security.credentials import (
    KeyFolder,
    check_credentials,
    curve_credentials,
    load_allowed,
    load_credential,
    load_server,
)
from launch.cli import main
from launch.keys import make, revoke
from tests.rigs.refusals import refused


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    found = KeyFolder(tmp_path / "keys")
    make(found, ["a", "b"])
    return found


def contents(folder: KeyFolder) -> dict[str, bytes]:
    return {str(f.relative_to(folder.path)): f.read_bytes() for f in folder.path.rglob("*.json")}


def test_every_role_and_node_gets_a_file_and_a_line_in_the_list(folder: KeyFolder) -> None:
    expected = {"server.json", "allowed.json", "learner.json", "observer.json", "nodes/a.json", "nodes/b.json"}
    assert set(contents(folder)) == expected
    listed = {(i.role, i.name) for i in load_allowed(folder.path).values()}
    nodes = {("node", "a"), ("node", "b")}
    assert listed == {("learner", "learner"), ("observer", "observer"), ("broker", "broker"), *nodes}
    assert {stat.S_IMODE(f.stat().st_mode) for f in folder.path.rglob("*.json")} == {0o600}, "only for the owner"
    assert {stat.S_IMODE(place.stat().st_mode) for place in (folder.path, folder.nodes)} == {0o700}
    text = (folder.nodes / "a.json").read_text()
    others = [load_server(folder.path).secret, load_credential(folder.path, "learner").secret]
    others += [load_credential(folder.path, "node", "b").secret, load_credential(folder.path, "observer").secret]
    assert not any(secret in text for secret in others), "a node's file has its own secret and public keys only"
    assert load_credential(folder.nodes / "a.json", "node").server_public == load_server(folder.path).public


def test_a_second_call_changes_nothing_and_a_later_one_only_adds(folder: KeyFolder) -> None:
    before = contents(folder)
    assert make(folder, ["a", "b"]) == []
    assert contents(folder) == before
    assert make(folder, ["c"]) == [folder.nodes / "c.json"]
    del before["allowed.json"]
    assert before.items() <= contents(folder).items()
    listed = load_allowed(folder.path)
    assert load_credential(folder.path, "node", "c").public in listed
    (folder.nodes / "a.json").unlink()
    folder.learner.unlink()
    assert make(folder, ["a", "d"]) == [folder.nodes / "d.json"], "what was handed out is not made again"
    assert load_allowed(folder.path).keys() > listed.keys()
    learner = next(i.public for i in listed.values() if i.role == "learner")
    assert load_credential(folder.path, "node", "d").learner_public == learner


def test_a_list_that_a_crash_kept_from_being_written_is_completed_and_a_lost_server_key_is_not_replaced(
    folder: KeyFolder,
) -> None:
    listed = load_allowed(folder.path)
    folder.allowed.unlink()
    make(folder, ["a", "b"])
    assert load_allowed(folder.path) == listed
    folder.server.unlink()
    with refused(UsageError, f"{folder.server} is", folder.allowed):
        make(folder, ["c"])


def test_a_revoked_credential_leaves_the_list_and_its_name_may_be_used_again(folder: KeyFolder) -> None:
    old = load_credential(folder.path, "node", "a").public
    revoke(folder, "a")
    assert old not in load_allowed(folder.path)
    make(folder, ["a"])
    assert load_credential(folder.path, "node", "a").public != old
    with refused(UsageError, "zzz", "b, a"):
        revoke(folder, "zzz")


def test_names_that_could_leave_the_folder_are_refused(folder: KeyFolder) -> None:
    for name in ("", "../x", "a/b", ".hidden", "x" * 65, "a\n"):
        with refused(UsageError, f"--node {name!r}"):
            make(folder, [name])


def test_the_command_makes_numbered_nodes_and_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", str(tmp_path / "k"), "--nodes", "2", "--node", "big"]) == 0
    assert sorted(f.name for f in KeyFolder(tmp_path / "k").node_files()) == ["big.json", "node-0.json", "node-1.json"]
    assert "broker.credentials" in capsys.readouterr().out
    assert main(["keys", str(tmp_path / "k"), "--revoke", "big"]) == 0
    (tmp_path / "file").write_text("")
    assert main(["keys", str(tmp_path / "file")]) == 2


def test_each_role_finds_its_file_and_an_observer_makes_do_with_any(folder: KeyFolder) -> None:
    assert load_credential(folder.path, "node", "b").name == "b"
    assert load_credential(folder.path, "node", "unknown").name == "a"
    assert load_credential(folder.path, "broker").public == load_server(folder.path).public
    folder.observer.unlink()
    assert load_credential(folder.path, "observer").role == "learner"
    assert load_credential(folder.nodes / "b.json", "observer").name == "b"


def damage_key(file: Path, name: str) -> None:
    """Put a character that Z85 does not have into a key, which keeps its length."""
    file.write_bytes(msgspec.json.encode({**msgspec.json.decode(file.read_bytes()), name: "~" * 40}))


@pytest.mark.parametrize(
    ("damage", "role", "facts"),
    [
        (lambda f: f.learner.unlink(), "learner", ["learner.json", "exist"]),
        (lambda f: f.learner.write_text("{}"), "learner", ["learner.json: expected"]),
        (lambda f: f.learner.write_bytes(b"\xff\xfe"), "learner", ["learner.json: expected"]),
        (lambda f: damage_key(f.nodes / "a.json", "learner_public"), "node", ["a.json: expected", "learner_public"]),
        (lambda f: f.learner.write_bytes(f.observer.read_bytes()), "learner", ["an observer"]),
        (lambda f: f.server.unlink(), "broker", ["server.json", "exist"]),
        (lambda f: [n.unlink() for n in f.node_files()], "node", ["--node NAME"]),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_what_was_expected(folder, damage, role, facts) -> None:  # type: ignore[no-untyped-def]
    damage(folder)
    with refused(UsageError, "broker.credentials: ", *facts):
        load_credential(folder.path, role)


def test_secrets_that_others_may_read_are_warned_about_and_an_error_never_shows_one(
    folder: KeyFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.learner.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        found = load_credential(folder.path, "learner")
    assert "mode 644" in caplog.text
    folder.learner.write_bytes(msgspec.json.encode({**msgspec.to_builtins(found), "secret": found.secret + "x"}))
    with pytest.raises(UsageError) as caught:
        load_credential(folder.path, "learner")
    assert found.secret[:10] not in str(caught.value)


def test_a_usable_place_is_told_from_one_that_is_not_and_one_of_redis_users_alone_has_no_keys_for_a_socket(
    folder: KeyFolder, tmp_path: Path
) -> None:
    for place in (str(folder.path), str(folder.nodes / "a.json")):
        assert (check_credentials(place), curve_credentials(place)) == (None, place)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no keys" in str(check_credentials(str(empty)))
    (empty / "broker.password").write_text("secret")
    assert [use(str(empty)) for use in (check_credentials, curve_credentials)] == [None, None], "no error with Redis"
    assert curve_credentials(None) is None
    assert "not exist" in str(check_credentials(str(tmp_path / "nowhere")))
    folder.observer.write_text("nonsense")
    assert "observer.json" in str(check_credentials(str(folder.path)))
