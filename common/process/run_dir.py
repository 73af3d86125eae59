"""The run folder: its paths, atomic files, where the broker listens, and whether a config belongs to the run."""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import msgspec

from common.config.loading import dump_yaml, load_either
from common.config.network_checks import fixed_address
from common.config.schema import BaseConfig
from common.config.scorers import OPERATION
from common.errors import BrokerUnreachable, ConfigError, DiskFull, SlipstreamError, UsageError
from common.hub import MODEL_KEYS, SCHEME
from common.json_lines import LineFile, decoder_of
from common.process import files
from common.process.files import pretty_json
from common.process.lifecycle import alive, birth_of, out_of_sight, pid_space
from common.run_reader import LineKey, no_file

POLL_S = 0.1  # between two looks for RUN/broker.json
ID_WAIT_S = 5.0  # for the content of a RUN/run_id that another broker is writing
# May change when a run is continued: they say how fast, how long or in which order of sums, not what is computed.
CHANGEABLE = (
    "run.dir", "run.steps", "run.max_restarts", "model.verify", "model.uncertified", "tasks.limits",
    "tasks.sources.*.limits.*", "learner.timeout_s", "learner.threads", "learner.checkpoint",
    "learner.memory", "learner.micro_batch_tokens", "learner.world_size", "learner.parallel",
    "learner.machines", "learner.machines_wait_s", "learner.interface",
    "learner.optimizer.decay_steps", "learner.critic.optimizer.decay_steps",  # follow run.steps unless they are set
    "rollout.nodes", "rollout.concurrency", "rollout.sample_timeout_s", "rollout.drain_s", "rollout.threads",
    "rollout.engine", "broker", "weights.transport", "weights.overlap", "weights.address", "weights.network",
    "weights.buffers", "weights.encoding", "weights.anchor_every", "weights.timeout_s", "weights.bucket_mib",
    "weights.canary_every", "weights.canary_tokens", "weights.canary_tolerance", "telemetry", "evaluation", "watch",
)  # fmt: skip
# May differ between the machines of a job.
OF_A_MACHINE = (
    "learner.machines", "learner.interface", "model.path", "tasks.dataset", "tasks.sources.*.dataset",
    "learner.loss.reference", "learner.critic.path", "tasks.limits.python",
)  # fmt: skip


class OtherRun(UsageError):
    """A folder has another run; `keys` are those in which its config differs, none for a run of another kind."""

    def __init__(self, text: str, keys: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.keys = list(keys)


class BrokerFile(msgspec.Struct, frozen=True):
    """RUN/broker.json, written by the broker when its socket is bound."""

    pid: int
    address: str
    started_s: float  # Unix time
    host: str = ""  # its machine; '' in the file of an earlier version
    birth: str = ""  # as lifecycle.birth_of; '' in the file of an earlier version
    space: str = ""  # as lifecycle.pid_space; '' in the file of an earlier version

    @classmethod
    def of_this_process(cls, address: str) -> "BrokerFile":
        return cls(os.getpid(), address, time.time(), socket.gethostname(), birth_of(os.getpid()), pid_space())

    @property
    def runs_here(self) -> bool:
        return alive(self.pid, self.birth, self.space)

    @property
    def ended(self) -> bool:
        """Whether the broker is known to have ended; another machine's or container's processes are not seen."""
        return not self.runs_here and not out_of_sight(self.host, self.space)


class RunDir:
    """Names of everything below RUN; reads and writes the small JSON files there."""

    def __init__(self, path: str | Path, checkpoints: str | None = None) -> None:
        """`checkpoints`: their folder, learner.checkpoint.dir; None: RUN/checkpoints."""
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.run_json = self.path / "run.json"
        self.run_id_file = self.path / "run_id"  # a learner with a folder of its own has none
        self.broker_json = self.path / "broker.json"
        self.recovering = self.path / "broker.recovering"  # exists while the broker reads the run's store
        self.status_json = self.path / "status.json"
        self.store = self.path / "store"  # with broker.store: file
        self.redis_json = self.path / "redis.json"  # which store in Redis is this run's, and how far it was seen
        self.ledger_json = self.path / "ledger.json"
        self.learner_json = self.path / "learner.json"
        self.resume_json = self.path / "resume.json"  # `slipstream resume` writes it
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.checkpoints = Path(checkpoints) if checkpoints else self.path / "checkpoints"
        self._label = self.checkpoints / "config.yaml"  # in any other folder: whose checkpoints they are
        self._owner = self.checkpoints / "run_id"  # beside it; a label of an earlier release has none
        self.model = self.path / "model"
        self.critic = self.path / "critic"  # the final value model, with learner.critic
        self.logs = self.path / "logs"
        self.report = self.path / "report"
        self.transcripts = self.path / "transcripts"
        self.trace = self.path / "trace"
        self.profiles = self.path / "profiles"
        self.evaluation = self.path / "evaluation"
        self.sinks = self.path / "sinks"
        self.quarantine = self.path / "quarantine"  # messages and groups that did not decode
        self.slurm_jobs = self.path / "slurm" / "jobs.json"
        self.up_lock = self.path / "up.lock"
        self.sft_lock = self.path / "sft.lock"

    @classmethod
    def of(cls, config: BaseConfig) -> "RunDir":
        return cls(config.run.dir, config.learner.checkpoint.dir)

    @property
    def began(self) -> bool:
        """Whether a role has worked here, or a cluster has jobs that will. Until then the config may change."""
        left = (self.broker_json, self.learner_json, self.metrics, self.store, self.checkpoints, self.slurm_jobs)
        return any(path.exists() for path in left)

    def broker(self) -> BrokerFile | None:
        """The broker's address and pid; None while no broker has written them or the file is unreadable."""
        try:
            return msgspec.json.decode(self.broker_json.read_bytes(), type=BrokerFile)
        except (OSError, ValueError):
            return None

    @property
    def run_id(self) -> str:
        """The id that `identify` made; '' where none has. Raises UsageError when it cannot be read."""
        return _read_id(self.run_id_file, "run.dir")

    def identify(self) -> str:
        """The run's random id, which its first broker makes here and every later one repeats, with whichever store.

        `up` makes it before its broker starts, and a warm start without a broker makes it itself.

        Raises UsageError when it cannot be read or written, or stays empty, DiskFull when the disk is full.
        """
        if known := self.run_id:
            return known
        made = secrets.token_hex(8).encode()
        own = self.run_id_file.with_name(f".{self.run_id_file.name}.{secrets.token_hex(8)}")
        try:
            write_atomic(own, made)
            try:
                os.link(own, self.run_id_file)  # brokers that stand by may start at the same time: one of them makes it
            except FileExistsError:
                pass
            except OSError:  # this file system has no hard links
                with contextlib.suppress(FileExistsError), self.run_id_file.open("xb") as file:
                    file.write(made)
                files.sync(self.run_id_file)
            finally:
                own.unlink(missing_ok=True)
            files.sync(self.path)
        except OSError as error:
            raise unwritable("run.dir", self.path, error) from error
        end = time.monotonic() + ID_WAIT_S
        while not (known := self.run_id):  # another broker has created it, and writes it
            if time.monotonic() > end:
                raise UsageError(f"run.dir: {self.run_id_file} is empty, as its writer was ended; remove this file")
            time.sleep(POLL_S)
        return known

    def prepare(self, config: BaseConfig) -> None:
        """Create the folder and write the resolved config.yaml and run.json.

        Raises OtherRun when the folder has a run of a config that does not agree with this one. Raises UsageError when
        the folder cannot be written, DiskFull when the disk is full.
        """
        self.check_agrees(config)
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            write_atomic(self.config, dump_yaml(config).encode())
            if not self.run_json.exists():
                revision, modified = source_revision()
                origin = {"name": config.run.name, "started_s": time.time(), "host": socket.gethostname()}
                origin |= {"python": sys.version.split()[0], "source_revision": revision, "source_modified": modified}
                write_json(self.run_json, origin)
        except OSError as error:
            raise unwritable("run.dir", self.path, error) from error

    def check_spares(self, file: str) -> None:
        """Raise ConfigError where `prepare` would replace the config `file` of a person, with its comments."""
        if Path(file).resolve() == self.config.resolve() and not self.run_json.exists():
            expected = "a folder without this config, which the run's own config.yaml would replace"
            hint = "a folder of its own, such as run.dir: run, or another name of the config"
            raise ConfigError(file, "run.dir", expected, str(self.path), hint)

    def check_agrees(self, config: BaseConfig) -> None:
        """Raise OtherRun when RUN/config.yaml computes something else than `config`."""
        _check_same(self.config, config, "run.dir", changeable(config))

    def check_checkpoints(self, config: BaseConfig, run_id: str = "") -> None:
        """Raise OtherRun when the folder of checkpoints is another run's: learner.checkpoint.dir may name any.

        `run_id`: of this run; '' while it is not known here. Raises UsageError when a file cannot be read.
        """
        may_differ = (*changeable(config), *OF_A_MACHINE)
        other = RunDir(self.checkpoints.parent)
        _check_same(self._label, config, "learner.checkpoint.dir", may_differ)
        if other.run_json.exists() and other.checkpoints == self.checkpoints:
            _check_same(other.config, config, "learner.checkpoint.dir", may_differ)
            self._check_owner(other.run_id, run_id, f"{other.path}")
        if theirs := _read_id(self._owner, "learner.checkpoint.dir"):
            folder = load_either(self._label).run.dir if self._label.exists() else "another folder"
            if Path(folder).resolve() != self.path.resolve():  # else that run's folder was lost, and this one goes on
                hint = f". If the checkpoints are for this run, remove {self._owner}"
                self._check_owner(theirs, run_id, folder, hint)

    def _check_owner(self, theirs: str, ours: str, folder: str, hint: str = "") -> None:
        if theirs and ours and theirs != ours:
            text = (
                f"learner.checkpoint.dir: {self.checkpoints} belongs to the run of {folder}, id {theirs}; the run of "
            )
            text += f"{self.path} has id {ours}. Choose another learner.checkpoint.dir, or continue with "
            raise OtherRun(f"{text}run.dir={folder}{hint}")

    def label_checkpoints(self, config: BaseConfig, run_id: str = "") -> None:
        """Say in a folder of checkpoints whose they are, unless it is RUN/checkpoints. `run_id`: '' where unknown.

        Raises as `check_checkpoints` and `prepare`.
        """
        self.check_checkpoints(config, run_id)
        try:
            if self.checkpoints != self.path / "checkpoints":
                write_atomic(self._label, dump_yaml(config).encode())
                if run_id:
                    write_atomic(self._owner, run_id.encode())
        except OSError as error:
            raise unwritable("learner.checkpoint.dir", self.checkpoints, error) from error


def find_broker(config: BaseConfig, run: RunDir, wait_s: float) -> str:
    """The configured address, or the one in RUN/broker.json once a living broker wrote it: roles start in any order.

    After `wait_s` it takes the address of a process that is not alive here, which may run on another machine.
    Raises BrokerUnreachable when there is no RUN/broker.json by then.
    """
    fixed = fixed_address(config)
    if fixed is not None:
        return fixed
    end = time.monotonic() + wait_s
    while (found := running_broker(run)) is None and time.monotonic() < end:
        time.sleep(POLL_S)
    if found is not None:
        return found
    if (file := run.broker()) is not None:
        return file.address
    hint = "is `slipstream broker CONFIG` running? A node reaches another machine's broker with --join tcp://HOST:PORT"
    raise BrokerUnreachable(f"no broker wrote {run.broker_json} within {wait_s:.0f} s; {hint}")


def known_broker(config: BaseConfig, run: RunDir) -> str:
    """As `find_broker`, without waiting; '' while RUN/broker.json names no broker, or one that has ended."""
    fixed, file = fixed_address(config), run.broker()
    return fixed or ("" if file is None or file.ended else file.address)


def running_broker(run: RunDir) -> str | None:
    """The address in RUN/broker.json when the process that wrote it is alive on this machine."""
    file = run.broker()
    return file.address if file is not None and file.runs_here else None


def changeable(config: BaseConfig) -> tuple[str, ...]:
    """CHANGEABLE, for this kind of run: the evaluation of a warm start decides which rows are trained."""
    if config.rl is None:
        return tuple(key for key in CHANGEABLE if key != "evaluation")
    return (*CHANGEABLE, *(f"scorers.{name}.{key}" for name in config.rl.scorers for key in OPERATION))


def unwritable(key: str, folder: Path, error: OSError) -> SlipstreamError:
    """The error about a place that `key` names: UsageError unless the disk is full."""
    kind = DiskFull if error.errno in files.FULL else UsageError
    return kind(f"{key}: {folder} cannot be written: {error}")


def _read_id(file: Path, key: str) -> str:
    try:
        return file.read_text("ascii")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{key}: {file} cannot be read: {error}") from error


def _check_same(file: Path, config: BaseConfig, key: str, may_differ: Sequence[str]) -> None:
    try:
        before = load_either(file) if file.exists() else config
    except OSError as error:
        raise UsageError(f"{key}: {file} cannot be read: {error}") from error
    if type(before) is not type(config):
        raise OtherRun(f"{file.parent} already has {before.kind}; choose another {key}")
    differing = {
        key: f"{key} was {old!r} and now is {new!r}" for key, old, new in other_values(before, config, may_differ)
    }
    if differing:
        shown = "; ".join([*differing.values()][:3]) + ("; ..." if len(differing) > 3 else "")
        text = f"{file.parent} has a run of another config: {shown}; choose another {key} or remove it"
        raise OtherRun(text, [*differing])


def other_values(old: BaseConfig, new: BaseConfig, may_differ: Sequence[str]) -> Iterator[tuple[str, object, object]]:
    """As `differences`, without the dotted keys of `may_differ` (* is any name) and those in a section of them.

    A model of the hub without a revision may get one: the learner compares the files, and the branch may have moved.
    """
    for key, before, now in differences(msgspec.to_builtins(old), msgspec.to_builtins(new)):
        if key in MODEL_KEYS and f"{before}".startswith(SCHEME) and f"{now}".startswith(f"{before}@"):
            continue
        if not any(fnmatchcase(key, c) or key.startswith(c + ".") for c in may_differ):
            yield key, before, now


def differences(old: dict[str, Any], new: dict[str, Any], at: str = "") -> Iterator[tuple[str, object, object]]:
    """(dotted key, old value, new value) of every leaf in which two nested mappings differ."""
    for name in [*old, *(n for n in new if n not in old)]:
        key = f"{at}.{name}" if at else name
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from differences(cast("dict[str, Any]", a), cast("dict[str, Any]", b), key)
        elif a != b:
            yield key, a, b


class AtomicFile:
    """A file that takes the place of `path` when it is complete; a reader sees the old or the new content."""

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        """Begin a file beside `path`, from whose `mode` the umask is taken: a group may share a run. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        handle = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        self._file = os.fdopen(handle, "wb")

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def finish(self, sync: bool = True) -> None:
        """Replace `path`; `sync`: only when the content has reached the disk, and so has then the new name."""
        self._file.flush()
        if sync:
            os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self._path)
        if sync:
            files.sync(self._path.parent)

    def discard(self) -> None:
        """Leave `path` as it is."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def discard_unfinished(path: Path) -> None:
    """Remove every AtomicFile of `path` whose writer was killed. Only the one who writes `path` may call it."""
    for file in path.parent.glob(f".{path.name}.*"):
        file.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes, mode: int = 0o666, *, sync: bool = True) -> None:
    """Replace `path` by an AtomicFile; with `sync` the new content stays when the machine loses power after this."""
    file = AtomicFile(path, mode)
    try:
        file.write(data)
        file.finish(sync)
    except BaseException:
        file.discard()
        raise


def write_json(path: Path, value: object) -> None:
    """Atomically write anything that msgspec encodes, indented for people."""
    write_atomic(path, pretty_json(value))


class MetricsWriter(LineFile):
    """The writer of RUN/metrics.jsonl, one JSON line per step."""

    def __init__(self, path: Path, keep_before_step: int = 0) -> None:
        """Open for appending; lines of steps >= `keep_before_step` are removed first, as is a torn last line.

        A learner that resumes from step s writes its lines from s again, so the file has one per step. Lines of a
        `kind` are about a version, and those of version s stay.
        Raises UsageError when `path` is a folder, or may not be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            data = path.read_bytes() if path.exists() else b""
            key_of = decoder_of(LineKey)
            keyed = ((line, key_of(line)) for line in data.split(b"\n"))
            kept = [x for x, key in keyed if key and key.step < keep_before_step + (key.kind is not None)]
            if (text := b"".join(line + b"\n" for line in kept)) != data:
                write_atomic(path, text)
            super().__init__(path)
        except (IsADirectoryError, PermissionError) as error:
            raise no_file(path, error) from None


def source_revision() -> tuple[str | None, bool]:
    """(git commit of this source tree, whether tracked files are modified); (None, False) outside a checkout."""
    root = Path(__file__).resolve().parents[2]

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        if (root / ".git").exists():
            return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        pass
    return None, False
