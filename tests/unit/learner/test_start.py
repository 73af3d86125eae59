"""How a learner finds its broker, its incarnation and its dataset again."""

import errno
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from safetensors.numpy import save_file

from broker.contract import RunInfo
from common.config.converted import Converted, config_digest
from common.config.optimizer import OptimizerConfig
from common.config.schema import Config
from common.errors import BrokerError, BrokerUnreachable, UsageError
from common.process.run_dir import BrokerFile, OtherRun, RunDir, find_broker, write_json
from common.waste import Waste
from learner.checkpoint.folder import CheckpointFolder, StreamState, TrainerState
from learner.loop.lead_rank import LeadRank, prepare_lead
from learner.loop.run_files import RunFiles, read_record, write_record
from learner.loop.status_reporter import StatusReporter
from learner.main import only_warm_start, sft_run_id, train
from tests.rigs.brokers import MemoryBroker, MemoryLearner, run_info
from tests.rigs.refusals import refused
from tests.rigs.waiting import LIMIT_S

MakeConfig = Callable[..., Config]


def test_a_broker_is_found_by_the_config_or_once_it_wrote_its_file(make_config: MakeConfig, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for address in ("tcp://127.0.0.1:7000", "ipc:///x"):
        assert find_broker(make_config(broker={"address": address}), run_dir, 0.0) == address
    config = make_config()
    began = time.monotonic()
    with refused(BrokerUnreachable, run_dir.broker_json):
        find_broker(config, run_dir, wait_s=0.2)
    assert time.monotonic() - began < 50
    ended = subprocess.Popen(["true"])
    ended.wait()
    write_json(run_dir.broker_json, BrokerFile(ended.pid, "tcp://127.0.0.1:1", 0.0))
    living = BrokerFile(os.getpid(), "tcp://127.0.0.1:2", 0.0)
    appears = threading.Timer(0.3, write_json, (run_dir.broker_json, living))
    appears.start()
    assert find_broker(config, run_dir, wait_s=LIMIT_S) == "tcp://127.0.0.1:2"
    appears.join(LIMIT_S)


def test_incarnations_count_over_records_and_checkpoints(make_config: MakeConfig) -> None:
    config = make_config()
    run_dir = RunDir(config.run.dir)

    def next_incarnation() -> int:
        run_dir.prepare(config)
        files = RunFiles(config, run_dir)
        state = files.start("digest")
        files.events.close()
        return state.incarnation

    assert [next_incarnation(), next_incarnation()] == [0, 1]
    complete(CheckpointFolder(run_dir.checkpoints, 2), 2, "digest", incarnation=4)
    assert next_incarnation() == 5
    for torn in (b"{torn", b'{"state": "\xff"}'):
        run_dir.learner_json.write_bytes(torn)
        assert read_record(run_dir) is None
    assert next_incarnation() == 5


def prepare(config: Config) -> tuple[LeadRank, TrainerState]:
    run_dir = RunDir.of(config)
    run_dir.prepare(config)
    return prepare_lead(config, run_dir, RunFiles(config, run_dir), "tcp://127.0.0.1:9", lambda: None)


def complete(folder: CheckpointFolder, version: int, dataset_digest: str, incarnation: int = 0) -> None:
    """Write a checkpoint of `version`."""
    folder.begin(version).mkdir()
    state = TrainerState(
        policy_version=version,
        incarnation=incarnation,
        tasks=StreamState(),
        dataset_digest=dataset_digest,
        tokens_wasted_total=3 * version,
        tokens_masked_total=2 * version,
    )
    folder.finish(state)


def test_another_dataset_is_refused_at_resume(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    complete(CheckpointFolder(RunDir(config.run.dir).checkpoints, 2), 2, "other")
    with refused(UsageError, "tasks.dataset", "step-000002"):
        prepare(config)


def model_folder(folder: Path, **files: str) -> Path:
    """A model of 60 numbers with these files. In their names _ stands for the point."""
    folder.mkdir(parents=True)
    save_file({"a": np.arange(60, dtype=np.float32)}, folder / "model.safetensors")
    for name, text in ({"config_json": "{}", "tokenizer_json": "{}", "README_md": "a"} | files).items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def continues(
    make_config: MakeConfig, model: Path, name: str = "", reference: Path | None = None, version: int = 4
) -> dict[str, dict[str, str]]:
    """Start a learner, which finishes a checkpoint of `version`; returns what that knows of the models.

    `name`: as the config names the model of the hub whose copy `model` is.
    """
    loss = {"reference": str(reference)} if reference else {}
    local = make_config(model={"path": str(model)}, learner={"loss": loss})
    named = make_config(model={"path": name or str(model)}, learner={"loss": loss})
    run_dir = RunDir(named.run.dir)
    run_dir.path.mkdir(exist_ok=True)
    files = RunFiles(named, run_dir, local)
    try:
        state = files.start("digest")
        folder = CheckpointFolder(run_dir.checkpoints, 2)
        folder.begin(version).mkdir()
        folder.finish(msgspec.structs.replace(state, policy_version=version))
    finally:
        files.events.close()
    return {key: {n: told for n, told in each.items() if n != "stamps"} for key, each in state.models.items()}


def test_a_run_continues_with_the_model_that_it_began_from_in_whatever_folder(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    complete(CheckpointFolder(RunDir(make_config().run.dir).checkpoints, 2), 2, "digest")
    known = continues(make_config, model_folder(tmp_path / "m"))  # the checkpoint before knew no model
    assert known["model.path"].keys() == {"config.json", "tokenizer.json", "weights"}
    moved = model_folder(tmp_path / "moved", README_md="b")
    assert continues(make_config, moved) == known
    parts = model_folder(tmp_path / "parts", model_safetensors_index_json="{}")
    (parts / "model.safetensors").rename(parts / "model-00001-of-00001.safetensors")
    assert continues(make_config, parts) == known


def test_weights_are_read_again_only_when_their_files_changed(
    make_config: MakeConfig, tmp_path: Path, caplog: Any
) -> None:
    caplog.set_level("INFO")
    model, reference = model_folder(tmp_path / "m"), model_folder(tmp_path / "r")
    known = continues(make_config, model, reference=reference)
    assert sum("reading parts of every tensor" in text for text in caplog.messages) == 2
    caplog.clear()
    for weights in (model / "model.safetensors", reference / "model.safetensors"):
        stat = weights.stat()
        weights.write_bytes(b"\xff" * stat.st_size)  # no safetensors file
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    for _ in range(2):
        assert continues(make_config, model, reference=reference) == known
    assert "reading" not in caplog.text
    os.utime(model / "model.safetensors", (1, 1))
    with refused(UsageError, "model.path", "cannot be read"):
        continues(make_config, model, reference=reference)


def test_a_converted_model_is_compared_at_every_start(make_config: MakeConfig, tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder = model_folder(tmp_path / name)
        (folder / "model.safetensors").unlink()
        (folder / "megatron").mkdir()
        told = Converted(
            source="m", dtype="float32", config=config_digest(folder), weights=name * 64, names=[], files={}
        )
        write_json(folder / "megatron" / "converted.json", told)
    known = continues(make_config, tmp_path / "a")
    assert continues(make_config, tmp_path / "a") == known
    with refused(UsageError, "model.path", "weights had digest aaaa"):
        continues(make_config, tmp_path / "b")


@pytest.mark.parametrize("changed", ["config.json", "tokenizer.json", "weights"])
def test_a_model_that_changed_beneath_a_run_is_refused_with_what_changed(
    make_config: MakeConfig, tmp_path: Path, changed: str
) -> None:
    model = model_folder(tmp_path / "m")
    before = continues(make_config, model)["model.path"]
    if changed == "weights":  # as a longer warm start does
        save_file({"a": np.arange(60, dtype=np.float32) + 1}, model / "model.safetensors")
    else:
        (model / changed).write_text('{"a": 1}')
    told = f"{changed} had digest {before[changed]} and now has"
    with refused(UsageError, "model.path", str(model), "step-000004", told):
        continues(make_config, model)


def test_a_copy_with_more_or_fewer_files_continues_the_run_with_a_warning(
    make_config: MakeConfig, tmp_path: Path, caplog: Any
) -> None:
    whole, parts = model_folder(tmp_path / "whole"), model_folder(tmp_path / "parts")
    (whole / "generation_config.json").write_text("{}")
    (parts / "chat_template.jinja").write_text("a")
    (parts / "additional_chat_templates").mkdir()  # no download of ours has these
    (parts / "additional_chat_templates" / "tools.jinja").write_text("b")
    continues(make_config, whole)
    assert "files of the model" not in caplog.text
    continues(make_config, parts)
    (warning,) = (text for text in caplog.messages if "files of the model" in text)
    assert "model.path: " in warning and "changes the prompts" in warning
    assert "generation_config.json is no longer there, chat_template.jinja is new;" in warning
    (parts / "chat_template.jinja").write_text("other")
    with refused(UsageError, "chat_template.jinja had digest"):
        continues(make_config, parts)
    (parts / "chat_template.jinja").write_text("a")
    (parts / "config.json").unlink()
    with refused(UsageError, "config.json had digest", "now has none"):
        continues(make_config, parts)


def test_the_reference_of_the_loss_is_compared_by_its_weights(make_config: MakeConfig, tmp_path: Path) -> None:
    model, reference = model_folder(tmp_path / "m"), model_folder(tmp_path / "r")
    continues(make_config, model, reference=reference)
    (reference / "tokenizer.json").write_text("other")
    continues(make_config, model, reference=reference)
    save_file({"a": np.zeros(60, dtype=np.float32)}, reference / "model.safetensors")
    with refused(UsageError, "learner.loss.reference", str(reference), "weights"):
        continues(make_config, model, reference=reference)


def test_a_branch_of_the_hub_that_moved_is_refused_with_the_commit_that_continues(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    first, second = (model_folder(tmp_path / "snapshots" / name, config_json=name) for name in ("c1", "c2"))
    assert continues(make_config, first, "hf://me/m")["model.path"]["commit"] == "c1"
    with refused(UsageError, "model.path: hf://me/m ", "config.json", "set model.path=me/m@c1"):
        continues(make_config, second, "hf://me/m")
    continues(make_config, first, "hf://me/m@c1")
    other = model_folder(tmp_path / "other" / "snapshots" / "c1", config_json="c3")
    for copy, name in ((other, "hf://me/m"), (second, str(second))):  # the same commit, and a folder, which has none
        with refused(UsageError, "config.json", "restore it"):
            continues(make_config, copy, name)
    with refused(UsageError, "config.json", "restore it"):
        continues(make_config, second, "hf://me/m@c2")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MemoryBroker:
    """The broker that `prepare_lead` finds."""
    broker = MemoryBroker(RunInfo("run", "RUN", 1, 2, 3, 60.0, 1 << 30))
    monkeypatch.setattr("learner.loop.lead_rank.connect", lambda access: MemoryLearner(broker.state))
    return broker


def test_the_config_may_be_changed_where_that_is_harmless(make_config: MakeConfig, memory: MemoryBroker) -> None:
    config = make_config()
    RunDir(config.run.dir).prepare(config)
    longer = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, steps=100))
    lead, state = prepare(longer)
    assert state.policy_version == 0
    lead.files.events.close()


def linear(update: int, config: OptimizerConfig, total_steps: int) -> float:
    """As learner.megatron.optimizer.learning_rate, without a warm-up."""
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, update / config.decay_steps)
    return config.lr * (config.min_lr_fraction + (1 - config.min_lr_fraction) * (1 - done))


def test_raised_steps_that_change_the_learning_rate_are_told_with_the_key_that_keeps_it(
    make_config: MakeConfig, caplog: Any
) -> None:
    schedule = {"lr": 1.0, "schedule": "linear", "min_lr_fraction": 0.1}
    critic = {"warmup_steps": 20, "optimizer": schedule | {"lr": 2.0}}
    learner = {"optimizer": schedule, "critic": critic, "loss": {"advantage": "gae"}, "epochs": 2}

    def starts(steps: int, version: int, sections: dict[str, Any] = learner) -> TrainerState:
        config = make_config(run={"steps": steps}, learner=sections)
        run_dir = RunDir(config.run.dir)
        run_dir.prepare(config)
        files = RunFiles(config, run_dir)
        state = files.start("digest")
        assert state.policy_version in (0, version)
        files.warn_of_schedule(state.policy_version, linear)
        files.events.close()
        folder = CheckpointFolder(run_dir.checkpoints, 2)
        folder.begin(version).mkdir()
        folder.finish(msgspec.structs.replace(state, policy_version=version))
        return state

    assert starts(100, 100).schedule_ends == {0: (160, 200)}
    assert starts(100, 100).schedule_ends == {0: (160, 200)}
    assert "schedule" not in caplog.text
    assert starts(200, 100).schedule_ends == {0: (160, 200), 100: (360, 400)}
    policy, critics = (text for text in caplog.messages if "schedule" in text)
    assert policy.startswith("learner.optimizer: the linear schedule ends at update 360 instead of 160;")
    assert "rate is 0.6 instead of 0.1;" in policy and policy.endswith("set learner.optimizer.decay_steps: 160")
    assert "rate is 1.1 instead of 0.2;" in critics and critics.endswith("learner.critic.optimizer.decay_steps: 200")
    caplog.clear()
    kept = learner | {
        "optimizer": schedule | {"decay_steps": 360},
        "critic": critic | {"optimizer": critic["optimizer"] | {"decay_steps": 400}},
    }
    assert max(starts(300, 100, kept).schedule_ends.values()) == (360, 400), "the keys may be set in a continued run"
    assert "schedule" not in caplog.text


def test_a_schedule_that_a_launch_would_refuse_is_not_advised(make_config: MakeConfig, caplog: Any) -> None:
    for steps in (100, 200):
        config = make_config(run={"steps": steps}, learner={"optimizer": {"schedule": "linear"}})
        run_dir = RunDir(config.run.dir)
        run_dir.prepare(config)
        files = RunFiles(config, run_dir)
        state = files.start("digest")
        files.warn_of_schedule(state.policy_version, linear)
        files.events.close()
        if steps == 100:
            folder = CheckpointFolder(run_dir.checkpoints, 2)
            folder.begin(50).mkdir()
            folder.finish(msgspec.structs.replace(state, policy_version=50))
    [told] = [text for text in caplog.messages if "linear schedule" in text]
    assert "ends at update 200 instead of 100" in told and "decay_steps" not in told


def test_a_constant_rate_and_a_checkpoint_of_an_earlier_release_warn_of_no_schedule(
    make_config: MakeConfig, caplog: Any
) -> None:
    for schedule, known in (("constant", {0: (8, 0)}), ("linear", {})):
        config = make_config(run={"steps": 100}, learner={"optimizer": {"schedule": schedule}})
        run_dir = RunDir(f"{config.run.dir}-{schedule}")
        folder = CheckpointFolder(run_dir.checkpoints, 2)
        folder.begin(4).mkdir()
        state = TrainerState(policy_version=4, incarnation=0, tasks=StreamState(), dataset_digest="digest")
        folder.finish(msgspec.structs.replace(state, schedule_ends=known))
        files = RunFiles(config, run_dir)
        assert files.start("digest").schedule_ends == known | {4: (100, 0)}
        files.warn_of_schedule(4, linear)
        files.events.close()
    assert "schedule" not in caplog.text


def test_a_machine_with_a_run_folder_of_its_own_leads_after_another_one_without_a_checkpoint(
    make_config: MakeConfig, memory: MemoryBroker, tmp_path: Path
) -> None:
    """Otherwise the broker refuses it, or nodes take its weights for those of the learner before."""
    memory.state.run = msgspec.structs.replace(memory.state.run, run_id="a")
    config = make_config(learner={"machines": 2, "world_size": 2, "checkpoint": {"dir": str(tmp_path / "shared")}})
    for number, machine in enumerate(("h1", "h1", "h2")):
        run = msgspec.structs.replace(config.run, dir=str(tmp_path / machine))
        lead, state = prepare(msgspec.structs.replace(config, run=run))
        assert state.incarnation == number
        lead.files.events.close()


def sft_lines(steps: int) -> str:
    return "".join(f'{{"step":{step},"loss":1.0,"time_s":1.0}}\n' for step in range(steps))


@pytest.mark.parametrize("fixed", ["before", "after"])
@pytest.mark.parametrize("release", ["this", "earlier"])
def test_a_run_whose_checkpoints_are_in_another_folder_begins_not_again(
    make_config: MakeConfig, tmp_path: Path, fixed: str, release: str
) -> None:
    """The steps of its metrics would be lost."""
    places: list[str | None] = [None, str(tmp_path / "fast")]
    former, latter = (
        make_config(learner={"checkpoint": {"dir": place}}) for place in (places if fixed == "after" else places[::-1])
    )
    run_dir, other = RunDir.of(former), RunDir.of(latter)
    run_dir.prepare(former)
    files = RunFiles(former, run_dir)
    files.start("digest")
    files.events.close()
    complete(files.checkpoints, 3, "digest")
    run_dir.metrics.write_text(sft_lines(4))
    if release == "earlier":
        record = msgspec.json.decode(run_dir.learner_json.read_bytes())
        write_json(run_dir.learner_json, {key: value for key, value in record.items() if key != "checkpoints"})
    other.prepare(latter)
    files = RunFiles(latter, other)
    if (fixed, release) != ("before", "earlier"):  # such a record does not say where they are
        with refused(UsageError, "learner.checkpoint.dir", other.checkpoints, run_dir.checkpoints, run_dir.metrics):
            files.start("digest")
        assert (run_dir.metrics.read_text(), other.checkpoints.exists()) == (sft_lines(4), False)
    run_dir.checkpoints.rename(other.checkpoints)
    assert files.start("digest").policy_version == 3
    files.events.close()


def test_a_run_that_was_moved_before_its_first_checkpoint_begins_again(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    for folder in (Path(config.run.dir), tmp_path / "moved"):
        RunDir(folder).prepare(config)
        files = RunFiles(config, RunDir(folder))
        assert files.start("digest").policy_version == 0
        files.events.close()
        (folder / "metrics.jsonl").write_text(sft_lines(4))
        if folder.name != "moved":
            folder.rename(tmp_path / "moved")


def test_a_learner_leaves_the_checkpoints_of_another_run_as_they_are(
    make_config: MakeConfig, memory: MemoryBroker, tmp_path: Path
) -> None:
    """The learner of the other run may be alive, in the middle of a checkpoint."""
    shared = tmp_path / "shared"
    config = make_config(learner={"checkpoint": {"dir": str(shared)}})
    memory.state.run = msgspec.structs.replace(memory.state.run, run_id="a")
    lead, _ = prepare(config)  # a folder of its own: the broker knows the id
    lead.files.events.close()
    scratch = lead.files.checkpoints.begin(2).parent
    memory.state = MemoryBroker(run_info(run_id="b")).state
    with refused(OtherRun, "learner.checkpoint.dir", str(shared), f"run.dir={config.run.dir}"):
        prepare(msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, dir=str(tmp_path / "second"))))
    assert scratch.exists()


def test_a_warm_start_has_an_id_of_its_own_or_that_of_the_broker_of_its_machines(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    run_dir = RunDir(config.run.dir)
    run_dir.prepare(config)
    monkeypatch.setattr("learner.main.connect_observer", lambda *_: MemoryBroker(run_info(run_id="a")).learner())
    assert (sft_run_id(config, run_dir, "tcp://127.0.0.1:9"), run_dir.run_id) == ("a", "")
    assert sft_run_id(config, run_dir, None) == run_dir.run_id != ""


def test_a_learner_that_cannot_send_weights_takes_no_run_over_and_one_that_cannot_bind_has_failed(
    make_config: MakeConfig, memory: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, process = make_config(weights={"transport": "nccl"}), SimpleNamespace(is_lead=True, stop_requested=str)
    run_dir = RunDir(config.run.dir)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with refused(UsageError, "weights.transport"):
        train(config, config, process, "tcp://127.0.0.1:9")
    assert (read_record(run_dir), memory.learner().status().learner) == (None, None)
    elsewhere = make_config(weights={"address": "192.0.2.1"})
    with pytest.raises(zmq.ZMQError) as unbound:
        train(elsewhere, elsewhere, process, "tcp://127.0.0.1:9")
    record, learner = read_record(run_dir), memory.learner().status().learner
    assert (record.state, learner.state) == ("failed", "failed")
    assert unbound.value.errno == errno.EADDRNOTAVAIL
    assert os.strerror(errno.EADDRNOTAVAIL) in learner.waiting_on


def test_a_learner_of_a_folder_with_another_runs_id_is_refused_and_one_of_a_folder_of_its_own_is_not(
    make_config: MakeConfig, memory: MemoryBroker
) -> None:
    memory.state.run = msgspec.structs.replace(memory.state.run, run_id="a")
    config = make_config()
    run_dir = RunDir(config.run.dir)
    run_dir.prepare(config)
    own = run_dir.identify()
    with refused(BrokerError, "'run' of RUN, id a", f"id {own}"):
        prepare(config)
    assert (read_record(run_dir), memory.learner().status().learner) == (None, None)
    run_dir.run_id_file.unlink()
    lead, state = prepare(config)
    assert state.incarnation == 0
    lead.files.events.close()


def test_a_learner_that_still_lives_commits_nothing_that_its_successor_has_not_read(
    make_config: MakeConfig, memory: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one completes version 2 while the second one starts: read and committed, or neither."""
    config = make_config()
    first, state = prepare(config)
    first.broker.attach(first.reporter.snapshot())
    digest = state.dataset_digest

    def complete_and_commit(version: int) -> None:
        complete(first.files.checkpoints, version, digest)
        first.broker.commit(version - 1)

    complete_and_commit(1)
    take_over = StatusReporter.take_over

    def at_the_last_moment(self: StatusReporter, incarnation: int, state: TrainerState) -> None:
        complete_and_commit(2)
        take_over(self, incarnation, state)
        reported = first.broker.status().learner
        assert reported is not None and reported.waste == {"failed": Waste(1), "masked": Waste(2)}

    monkeypatch.setattr(StatusReporter, "take_over", at_the_last_moment)
    second, state = prepare(config)
    assert (state.policy_version, state.incarnation) == (2, 1)
    assert second.reporter.snapshot().policy_version == 2
    assert second.reporter.snapshot().waste == {"failed": Waste(2), "masked": Waste(4)}, "before the first step"
    with refused(BrokerError, "incarnation 0", "incarnation 1"):
        complete_and_commit(3)
    first.files.events.close()
    second.files.events.close()


def test_a_second_warm_start_is_kept_out_where_files_can_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would remove the checkpoint that the first one writes, and cut the metrics file."""
    run_dir = RunDir(tmp_path / "run")
    words = ("run.dir", str(run_dir.path), f"pid {os.getpid()}")
    with only_warm_start(run_dir), refused(UsageError, *words), only_warm_start(run_dir):
        pass
    with only_warm_start(run_dir):
        pass
    shared = str(tmp_path / "shared")  # by a run and its copy
    run, copy = RunDir(tmp_path / "a", shared), RunDir(tmp_path / "b", shared)
    words = ("learner.checkpoint.dir", shared, f"pid {os.getpid()}")
    with only_warm_start(run), refused(UsageError, *words), only_warm_start(copy):
        pass
    with only_warm_start(copy):
        pass
    monkeypatch.setattr("fcntl.flock", lambda *_: os.open("/nowhere", os.O_RDONLY))
    with only_warm_start(run_dir):
        assert "nothing keeps a second warm start out" in caplog.text


def test_a_replaced_learner_leaves_the_record_of_its_successor_alone(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    write_record(run_dir, 1, "running", 20)
    write_record(run_dir, 0, "failed", 22)
    record = read_record(run_dir)
    assert record is not None
    assert (record.incarnation, record.state) == (1, "running")
