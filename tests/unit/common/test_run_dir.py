"""The run folder: atomic files, and which config may continue which run."""

import errno
import json
import os
import stat
from pathlib import Path

import msgspec
import pytest

from common.config.loading import load_config
from common.config.schema import Config, SftConfig, SftTasksConfig
from common.errors import UsageError
from common.json_lines import LineFile
from common.process.files import move_aside, replace_folder
from common.process.run_dir import OtherRun, RunDir, differences, write_atomic, write_json
from tests.rigs.configs import config_of
from tests.rigs.refusals import refused
from tests.rigs.waiting import read_jsonl


@pytest.fixture
def config(tmp_path) -> Config:
    return config_of(tmp_path / "run", steps=5)


def changed(config, **overrides):
    document = msgspec.to_builtins(config)
    for key, value in overrides.items():
        section, _, name = key.partition("__")
        document[section][name] = value
    return msgspec.convert(document, type(config))


def test_prepare_writes_resolved_config_and_origin(config):
    run = RunDir(config.run.dir)
    run.prepare(config)
    assert load_config(run.config) == config
    origin = json.loads(run.run_json.read_text())
    assert origin["name"] == "demo"
    assert {"source_revision", "host", "python", "started_s"} <= origin.keys()
    assert run.logs.is_dir()
    run.prepare(config)
    assert json.loads(run.run_json.read_text()) == origin, "the origin of the first start stays"


@pytest.mark.parametrize(
    ("key", "value"), [("run__seed", 2), ("model__path", "other"), ("rollout__group_size", 4), ("staleness__max", 0)]
)
def test_run_of_another_config_is_refused_with_the_key(config, key, value):
    RunDir(config.run.dir).prepare(config)
    with pytest.raises(OtherRun) as refused:
        RunDir(config.run.dir).prepare(changed(config, **{key: value}))
    assert refused.value.keys == [key.replace("__", ".")]
    assert load_config(RunDir(config.run.dir).config) == config


def test_a_model_of_the_hub_without_a_revision_may_get_one(config):
    """The learner refuses another commit than the run's; with its name the run continues."""
    run = RunDir(config.run.dir)
    run.prepare(changed(config, model__path="hf://me/m"))
    for other in ("hf://me/m2@c1", "hf://me/m2", "m@c1"):
        with pytest.raises(OtherRun):
            run.prepare(changed(config, model__path=other))
    run.prepare(named := changed(config, model__path="hf://me/m@c1"))
    assert load_config(run.config) == named
    for other in ("hf://me/m", "hf://me/m@c2"):
        with pytest.raises(OtherRun):
            run.prepare(changed(config, model__path=other))


def test_a_run_may_be_continued_longer_or_with_more_nodes_but_not_as_a_warm_start_or_in_a_file(config, tmp_path):
    run = RunDir(config.run.dir)
    run.prepare(config)
    for key, value in (
        ("run__steps", 9),
        ("rollout__nodes", 2),
        ("telemetry__refresh_s", 3.0),
        ("weights__network", "trusted"),
        ("weights__canary_tolerance", 2.0),  # an excluded node is no reason either
        ("learner__memory", {"offload_optimizer": True}),  # out of memory is no reason to begin anew
        ("learner__micro_batch_tokens", 8192),
        ("learner__world_size", 2),  # a GPU fewer or more: a checkpoint loads under every layout
        ("learner__parallel", {"tensor": 2}),
        ("learner__timeout_s", 900.0),  # `status` advises it for ranks that are silent
        ("model__verify", False),
        ("tasks__limits", {"reset_s": 60.0}),
    ):
        longer = changed(config, **{key: value})
        run.prepare(longer)
        assert load_config(run.config) == longer
    warm = SftConfig(run=config.run, model=config.model, tasks=SftTasksConfig(dataset="d"))
    with pytest.raises(OtherRun) as other:
        RunDir(config.run.dir).prepare(warm)
    assert other.value.keys == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as refused:
        RunDir(tmp_path / "file" / "run").prepare(config)
    assert str(refused.value).startswith(f"run.dir: {tmp_path}/file/run ")
    assert isinstance(refused.value.__cause__, NotADirectoryError)


def test_checkpoints_of_another_run_are_refused_with_the_key(config, tmp_path):
    shared = str(tmp_path / "shared")
    document = msgspec.to_builtins(config)
    document["learner"]["checkpoint"]["dir"] = shared
    first = msgspec.convert(document, type(config))
    RunDir.of(first).label_checkpoints(first)
    RunDir.of(first).check_checkpoints(changed(first, run__steps=9))
    RunDir.of(first).label_checkpoints(changed(first, model__path="/another/machine"))
    second = changed(first, run__dir=str(tmp_path / "second"), run__name="second")
    with pytest.raises(OtherRun) as other:
        RunDir.of(second).label_checkpoints(second)
    assert other.value.keys == ["run.name"]
    for fact in (shared, "'demo'", "learner.checkpoint.dir"):
        assert fact in str(other.value)
    RunDir.of(first).prepare(first)
    run = RunDir(tmp_path / "second", str(RunDir(first.run.dir).checkpoints))
    with pytest.raises(OtherRun) as other:  # the folder of a run that keeps them in RUN
        run.label_checkpoints(second)
    assert other.value.keys == ["run.name"]
    (tmp_path / "file").write_text("")
    run = RunDir(tmp_path / "run", str(tmp_path / "file"))
    with pytest.raises(UsageError) as refused:
        run.label_checkpoints(first)
    assert str(refused.value).startswith(f"learner.checkpoint.dir: {tmp_path}/file ")
    assert isinstance(refused.value.__cause__, OSError)


@pytest.mark.parametrize("inside", [False, True])
def test_checkpoints_of_a_run_with_another_id_are_refused_and_a_moved_run_goes_on(config, tmp_path, inside):
    shared = tmp_path / "first" / "ck" if inside else tmp_path / "shared"
    document = msgspec.to_builtins(changed(config, run__dir=str(tmp_path / "first")))
    document["learner"]["checkpoint"]["dir"] = str(shared)
    first = msgspec.convert(document, type(config))
    second = changed(first, run__dir=str(tmp_path / "second"))
    RunDir.of(second).prepare(second)
    RunDir.of(first).label_checkpoints(first)  # as an earlier release
    for _ in range(2):
        RunDir.of(first).label_checkpoints(first, "a")
        with pytest.raises(OtherRun) as other:
            RunDir.of(second).label_checkpoints(second, "b")
        text = f"{other.value}"
        assert all(fact in text for fact in ("learner.checkpoint.dir", f"run.dir={first.run.dir}", "id a", "id b"))
        assert (shared / "run_id").read_text() == "a"
    RunDir.of(second).check_checkpoints(second)  # a machine that does not know the id
    RunDir.of(second).label_checkpoints(second, "a")  # the run was moved
    (shared / "run_id").unlink()
    RunDir.of(second).label_checkpoints(second, "b")
    with pytest.raises(OtherRun):
        RunDir.of(first).check_checkpoints(first, "a")
    RunDir.of(second).label_checkpoints(second, "c")  # its folder was lost, with the id
    assert (shared / "run_id").read_text() == "c"


def test_the_checkpoints_in_the_folder_of_a_run_belong_to_it(config, tmp_path):
    RunDir.of(config).prepare(config)
    own = RunDir.of(config).identify()
    RunDir.of(config).label_checkpoints(config, own)
    assert not RunDir.of(config).checkpoints.exists()
    with pytest.raises(OtherRun) as other:
        RunDir(tmp_path / "second", str(RunDir.of(config).checkpoints)).check_checkpoints(config, "b")
    assert f"id {own}" in str(other.value)


def test_the_first_broker_gives_the_run_an_id_that_stays(tmp_path, monkeypatch):
    run, linked = RunDir(tmp_path), os.link
    assert run.run_id == ""
    run_of_another = RunDir(tmp_path)

    def later(*names):  # two brokers that stand by see no id, and both make one
        monkeypatch.setattr("os.link", linked)
        found.append(run_of_another.identify())
        linked(*names)

    found = []
    monkeypatch.setattr("os.link", later)
    found += [run.identify(), run.identify(), run.run_id]
    assert len(set(found)) == 1 and len(found[0]) == 16
    assert os.listdir(tmp_path) == ["run_id"]
    without_links = RunDir(tmp_path / "other")
    without_links.path.mkdir()
    monkeypatch.setattr("os.link", lambda *_: os.open(tmp_path / "no" / "link", os.O_RDONLY))
    assert without_links.identify() == without_links.run_id not in ("", *found)
    assert os.listdir(without_links.path) == ["run_id"]
    run.run_id_file.write_bytes(b"\xff")
    with refused(UsageError, "run.dir", run.run_id_file):
        run.identify()


def test_without_hard_links_too_brokers_that_start_together_get_one_id(tmp_path, monkeypatch):
    run, found = RunDir(tmp_path), []

    def no_link(*_):
        raise OSError(errno.EOPNOTSUPP, "no hard links")

    def later(*names):  # between the look for an id and the making of one another broker makes it
        monkeypatch.setattr("os.link", no_link)
        found.append(RunDir(tmp_path).identify())
        no_link()

    monkeypatch.setattr("os.link", later)
    found += [run.identify(), run.run_id]
    assert len(set(found)) == 1 and len(found[0]) == 16
    assert os.listdir(tmp_path) == ["run_id"]
    run.run_id_file.write_bytes(b"")  # the other broker has created it, and not yet written
    monkeypatch.setattr("time.sleep", lambda _: run.run_id_file.write_text("late"))
    assert run.identify() == "late"
    run.run_id_file.write_bytes(b"")
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr("common.process.run_dir.ID_WAIT_S", 0.01)
    with refused(UsageError, "run.dir", run.run_id_file, "remove"):
        run.identify()


def test_differences_are_found_at_every_depth():
    old, new = {"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 4}, "e": 5}
    assert list(differences(old, new)) == [("a.c", 2, 4), ("d", 3, None), ("e", None, 5)]


def test_files_of_other_processes_are_read_as_far_as_they_are_whole(tmp_path):
    run = RunDir(tmp_path)
    assert (run.broker(), read_jsonl(run.metrics)) == (None, [])
    run.broker_json.write_text("{")
    assert run.broker() is None
    write_json(run.broker_json, {"pid": 7, "address": "tcp://127.0.0.1:1", "started_s": 1.0})
    found = run.broker()
    assert found is not None
    assert (found.pid, found.address) == (7, "tcp://127.0.0.1:1")
    run.metrics.write_text('{"step": 0}\n[1]\n{"step": 1}\n{"st')
    assert read_jsonl(run.metrics) == [{"step": 0}, {"step": 1}]


def test_an_atomic_write_lasts_its_name_is_synced_after_its_content_and_a_failed_one_keeps_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"
        synced.append((kind, (tmp_path / "deep" / "it").exists()))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomic(tmp_path / "deep" / "it", b"content")
    assert synced == [("file", False), ("folder", True)]
    synced.clear()
    write_atomic(tmp_path / "deep" / "it", b"other", sync=False)
    assert synced == []

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError) as failed:
        write_atomic(tmp_path / "deep" / "it", b"new")
    assert failed.value.errno == errno.ENOSPC
    assert ((tmp_path / "deep" / "it").read_bytes(), os.listdir(tmp_path / "deep")) == (b"other", ["it"])


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o027, 0o640)])
def test_the_umask_says_who_else_may_write_a_run_and_secrets_stay_the_owner_s(
    tmp_path: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        write_json(tmp_path / "it", 1)
        LineFile(tmp_path / "lines").close()
        write_atomic(tmp_path / "key", b"secret", mode=0o600)
    finally:
        os.umask(before)
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert found == {"it": mode, "lines": mode, "key": 0o600}


def test_what_is_moved_aside_gets_the_first_free_number_before_its_suffix(tmp_path: Path) -> None:
    (tmp_path / "ledger-1.json").write_text("older")
    former, folder = tmp_path / "ledger.json", tmp_path / "store"
    former.write_text("newer")
    assert move_aside(former) == tmp_path / "ledger-2.json"
    assert not former.exists()
    assert [(tmp_path / f"ledger-{n}.json").read_text() for n in (1, 2)] == ["older", "newer"]
    folder.mkdir()
    (folder / "lock").write_text("")
    assert move_aside(folder) == tmp_path / "store-1"
    assert (tmp_path / "store-1" / "lock").exists()


def test_a_replacement_that_was_killed_between_its_two_renames_leaves_nothing_after_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(text: str) -> Path:
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "weights").write_text(text)
        return tmp_path / "new"

    renames, rename = iter(range(1)), os.rename

    def first_only(source: Path, target: Path) -> None:
        if next(renames, None) is None:
            raise KeyboardInterrupt
        rename(source, target)

    replace_folder(made("first"), tmp_path / "model")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "rename", first_only)
        replace_folder(made("second"), tmp_path / "model")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".model.removed.tmp", "new"]
    replace_folder(tmp_path / "new", tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "weights").read_text() == "second"
