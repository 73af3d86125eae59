"""The things that a config names: model, dataset, credentials, the disk of its run, addresses and servers."""

import fcntl
import math
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from common.config.converted import is_converted, read_converted
from common.config.group_size import most_kept_bytes
from common.config.loss import plugins
from common.config.network_checks import split_address
from common.config.schema import BaseConfig, Config
from common.errors import ConfigError, SlipstreamError, UsageError
from common.json_lines import dataset_exists, dataset_rows, first_row
from common.process.files import sync
from common.security.credentials import KeyFolder
from launch.certificates import KEY as UNCERTIFIED
from launch.checks.findings import Finding, few, fine, problem, refusal, warning
from launch.checks.review import Review
from launch.plan.job_plan import GIB, MIB, Plan
from learner.loss.plugins import can_check
from rollout_fleet.environments.description import Description

INDEX = "model.safetensors.index.json"
MOST_HEADER_BYTES = 100 << 20
LFS = b"version https://git-lfs"
READ_BYTES = 64 << 20  # the part of a dataset that is read
ROW_CHARS = 300  # a longer row is cut where it is shown
GET_AGAIN = "get it again: `hf download NAME --local-dir FOLDER`"
VOLATILE = ("tmpfs", "ramfs")
SLOW_SYNC_S = 0.05
LOGS_BYTES = 256 * MIB  # logs, metrics, the ledger
SYNCS = 5
LOCAL = "run.dir=FOLDER on a local file system"


def check_config_and_files(review: Review) -> Iterator[Finding]:
    """Everything that a launch would refuse, then the content of the files, which a launch reads too late."""
    config = review.config
    refused = [*review.refused, *review.missing]
    yield from (refusal(wrong, review.file) for wrong in refused if wrong.key != UNCERTIFIED)  # a finding of its own
    if not refused:
        yield fine("config", f"{review.file} passes the checks of a launch")
    yield from (remark for remark in review.remarks if remark.level == "warning")
    yield from check_parts(review)
    yield from check_model(Path(config.model.path))
    weights = [source.weight for source in config.rl.tasks.sources.values()] if config.rl is not None else []
    unread = {wrong.key for wrong in refused}
    for (key, path), weight in zip(config.tasks.datasets.items(), weights or [1.0], strict=True):
        if key not in unread:
            yield from check_dataset(key, Path(path), config, share=weight / (sum(weights) or 1.0))
    for name, environment in review.environments.items():
        if config.rl is not None and not environment.agent:
            job = config.rl.sources[name]
            yield from check_first_row(job, environment, f"tasks.sources.{name}" if name else "tasks")
    if config.rl is not None and config.rl.scorers and review.environments.keys() == config.rl.sources.keys():
        yield from check_scorers(config.rl, review.file)
    if config.broker.credentials is not None:
        yield from check_permissions(Path(config.broker.credentials))


def check_parts(review: Review) -> Iterator[Finding]:
    """The parts of the loss that the config names by import path; what is wrong with them is among the refused."""
    named = plugins(review.config.rl) if review.config.rl is not None else {}
    if named and not can_check():
        what = f"{few([*named])}: this Python has no torch, so {'it is' if len(named) == 1 else 'they are'} not checked"
        why = "the learner checks a part of the loss when it starts, and ends if it is wrong"
        yield warning("loss", "unchecked", what, why=why, fix="run doctor in the learner's environment")
    elif named and not any(wrong.key.removesuffix("_options") in named for wrong in review.refused):
        yield fine("loss", f"{few([*named.values()])}: finite, differentiable, the same however it is packed")


# ---------------------------------------------------------------- model and dataset


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]  # the file of each tensor, by the tensor's name


def check_model(folder: Path) -> Iterator[Finding]:
    """Every safetensors file is whole, and every one that the index names is there."""
    files = sorted(folder.glob("*.safetensors"))
    if is_converted(folder):
        with suppress(UsageError):  # said by the config's checks, as is a folder without weights
            made = read_converted(folder)
            yield fine("model", f"converted weights, {made.weight_bytes / GIB:.2f} GiB in {made.dtype}, all whole")
    if not files:
        return
    found: list[Finding] = []
    index = folder / INDEX
    try:
        names = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values() if index.is_file() else ()
        if missing := sorted(name for name in set(names) if not (folder / name).is_file()):
            why = f"{INDEX} says that tensors are in them"
            found.append(problem("model", "files_missing", f"{folder} lacks {few(missing)}", why=why, fix=GET_AGAIN))
    except (OSError, msgspec.DecodeError) as error:
        what = f"{index} cannot be read: {error}"
        found.append(problem("model", "index", what, why="weights cannot be found by name", fix=GET_AGAIN))
    if broken := [f"{file.name}: {reason}" for file in files if (reason := broken_weights(file))]:
        why = "a download that was cut off, most likely"
        found.append(problem("model", "broken", few(broken), why=why, fix=GET_AGAIN))
    yield from found
    if not found:
        size = sum(file.stat().st_size for file in files) / GIB
        yield fine("model", f"{len(files)} file{'s' * (len(files) > 1)} of weights, {size:.2f} GiB, all whole")


class _Tensor(msgspec.Struct, frozen=True):
    data_offsets: tuple[int, int]


def broken_weights(file: Path) -> str:
    """Why a safetensors file cannot be whole, from its header and its size; '' when it can."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(len(LFS))
            if start == LFS:
                return "a pointer of git-lfs, not the file (git lfs pull)"
            length = int.from_bytes(start[:8], "little")
            if not 2 <= length <= min(size - 8, MOST_HEADER_BYTES):
                return f"no safetensors file of {size:,} bytes"
            opened.seek(8)
            header = msgspec.json.decode(opened.read(length), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        ends = [msgspec.json.decode(tensor, type=_Tensor).data_offsets[1] for tensor in header.values()]
    except OSError as error:
        return f"cannot be read: {error}"
    except ValueError as error:
        return f"its header does not describe tensors: {error}"
    expected = 8 + length + max(ends, default=0)
    return "" if size == expected else f"{size:,} bytes, {expected:,} expected"


def check_dataset(key: str, file: Path, config: BaseConfig, share: float = 1.0) -> Iterator[Finding]:
    """Every line is a JSON object, and a step finds enough of them for its `share` from here."""
    if not dataset_exists(file):
        return  # a name of the hub
    rows = read = 0
    try:
        for _, row in dataset_rows(file, key):
            rows += 1
            read += len(row)
            if read > READ_BYTES:
                break
    except UsageError as error:
        why = "a task is one JSON object on a line of its own, or a row of a parquet file"
        yield problem("dataset", "bad_line", str(error), why=why, fix="make the file readable; fix or remove the line")
        return
    wanted = math.ceil(config.learner.rows_per_step * share)
    whole = read <= READ_BYTES
    what = f"{key}: {rows:,} rows" + ("" if whole else f" in the first {READ_BYTES >> 20} MiB")
    if rows < wanted and whole:
        why = f"a step takes {wanted}, so each would see some of them twice"
        yield warning("dataset", "few_rows", what, why=why, fix="more rows, or a smaller learner.groups_per_step")
    else:
        yield fine("dataset", what)


def check_first_row(config: Config, environment: Description, at: str = "tasks") -> Iterator[Finding]:
    """The environment of the dataset's first row is built and reset, as in an episode; rewards judge an answer.

    `at`: the key path of the config's source.
    """
    from rollout_fleet.driver_factory import try_episode
    from rollout_fleet.episode.driver import EpisodeFailed

    name = config.tasks.environment or f"{at}.reward"
    reason = ""
    if (found := first_row(config.tasks.dataset)) is None:
        return  # said by the config's checks, or a name of the hub
    where, row = found
    try:
        try_episode(config, environment, msgspec.json.decode(row))
    except (EpisodeFailed, SlipstreamError) as error:
        reason = str(error)
    if reason:
        what = f"{name} fails on the first row of {at}.dataset: {reason}"
        why = f"every sample of such a row would fail; {where}: {row.decode(errors='replace')[:ROW_CHARS]}"
        fix = "a dataset whose rows are as the environment reads them, or an environment that reads these"
        yield problem("environment", "first_row", what, why=why, fix=fix)
    else:
        yield fine("environment", f"{name} begins on the first row of {at}.dataset")


def check_scorers(config: Config, file: str) -> Iterator[Finding]:
    """Each scorer answers, serves its model, and takes a request about a made-up answer."""
    from rollout_fleet.scorers import check

    why = "each answer needs a score; a sample without one fails"
    try:
        for silent in check.check_scorers(config, file):
            yield warning(
                "scorers", "silent", silent, why=why, fix="start its server, or correct the key that is named"
            )
    except ConfigError as error:
        yield refusal(error.problem, file)


def check_permissions(path: Path) -> Iterator[Finding]:
    """Secret keys are their owner's alone; `path` is a key folder or one credential."""
    if not path.exists():
        return  # said by the config's checks
    folder = KeyFolder(path)
    files = [path] if path.is_file() else [folder.server, *folder.client_files(), *path.glob("*.password")]
    secret = [file for file in files if file.exists()]
    shared = [file for file in secret if file.stat().st_mode & 0o077]
    unreadable = [file for file in secret if not os.access(file, os.R_OK)]
    if shared:
        why = "who reads a key can speak in the name of its role"
        fix = f"chmod 600 {' '.join(map(str, shared))}"
        yield problem("credentials", "shared", f"others may read {few(shared)}", why=why, fix=fix)
    if unreadable:
        what = f"{few(unreadable)} cannot be read"
        yield problem("credentials", "unreadable", what, why="the role cannot prove who it is", fix="chown it")
    if not shared and not unreadable:
        yield fine("credentials", f"{len(secret)} files, their owner's alone")


# ---------------------------------------------------------------- disk


def check_disk(run_dir: Path, config: BaseConfig, plan: Plan | None) -> Iterator[Finding]:
    """Room, and whether a sync reaches the disk and a lock keeps a second broker out."""
    folder = next((path for path in (run_dir, *run_dir.parents) if os.path.isdir(path)), Path("/"))
    if not os.access(folder, os.W_OK | os.X_OK):
        fix = "run.dir=FOLDER elsewhere, or chown it"
        yield problem("disk", "unwritable", f"{folder} cannot be written", why="every role writes there", fix=fix)
        return
    yield _space(folder, config, plan)
    inside = [p for p in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(p.mountpoint)]
    kind = max(reversed(inside), key=lambda p: len(p.mountpoint)).fstype if inside else ""
    if kind in VOLATILE:
        why = "checkpoints and groups are gone with the power, whatever broker.durability promises, and take memory"
        fix = "run.dir=FOLDER on a disk"
        yield warning("file system", "volatile", f"{folder} is on a {kind}", why=why, fix=fix)
    yield _sync(folder, config)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        why = "two brokers of one run could write the same store"
        yield problem("locks", "unsupported", f"{folder}: {error.strerror or error}", why=why, fix=LOCAL)


def _space(folder: Path, config: BaseConfig, plan: Plan | None) -> Finding:
    """Room for checkpoints, the final model, and the broker's groups, all of full length."""
    free = shutil.disk_usage(folder).free
    needed: float = LOGS_BYTES
    if plan is not None:
        weights = plan.rl.publish.bytes if plan.rl is not None else plan.parameters * 4
        needed += plan.checkpoint.bytes * plan.checkpoint.kept + weights
        if (job := config.rl) is not None and plan.rl is not None and job.broker.store == "file":
            step = job.learner.groups_per_step * plan.rl.window.group_bytes
            steps = job.broker.retain_steps + job.learner.checkpoint.every + job.staleness.max + 1
            needed += min(steps * step, 2 * most_kept_bytes(job))
    why = "on a full disk the broker acknowledges nothing and checkpoints fail"
    fix = "run.dir=FOLDER on a larger disk, or a smaller learner.checkpoint.keep or broker.retain_steps"
    what = f"{free / GIB:.1f} GiB free under {folder}, up to {needed / GIB:.1f} needed"
    if free < needed / 2:
        return problem("disk", "full", what, why=why, fix=fix)
    return warning("disk", "tight", what, why=why, fix=fix) if free < needed else fine("disk", what)


def _sync(folder: Path, config: BaseConfig) -> Finding:
    """The median time of one append and fsync, where fsync of a file and of its folder works."""
    taken: list[float] = []
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            for _ in range(SYNCS):
                file.write(b"x" * 4096)
                file.flush()
                began = time.perf_counter()
                os.fsync(file.fileno())
                taken.append(time.perf_counter() - began)
            sync(folder)
    except OSError as error:
        why = "neither checkpoints nor the broker's promises would be on the disk when they say so"
        return problem("fsync", "unsupported", f"{folder}: {error.strerror or error}", why=why, fix=LOCAL)
    waits = config.rl is not None and config.rl.broker.durability == "fsync"
    seconds = statistics.median(taken)
    if seconds > SLOW_SYNC_S and waits:
        why = "each promise of the broker waits for one, so groups take longer to be ready"
        fix = "run.dir on a faster disk, or broker.durability=everysec (docs/delivery.md says what that costs)"
        return warning("fsync", "slow", f"{seconds * 1e3:.1f} ms", why=why, fix=fix)
    return fine("fsync", f"{seconds * 1e3:.1f} ms")


# ---------------------------------------------------------------- network


def check_network(config: Config, running: bool) -> Iterator[Finding]:
    """Addresses are free and servers answer. `running`: the broker of this config's run has taken its own port."""
    host = config.weights.address
    if reason := bind_error(host, 0):
        why = "the learner's weight plane listens there, on a port that it picks"
        fix = "an address that `ip address` shows on the learner's machine"
        yield problem("weights.address", "not_here", f"{host}: {reason}", why=why, fix=fix)
    if config.broker.store == "redis":
        yield from check_redis(config)
    if not running and len(config.broker.addresses) == 1:
        yield from check_port(config.broker.addresses[0])


def check_port(address: str) -> Iterator[Finding]:
    """The embedded broker's address is free."""
    try:
        host, port = split_address(address)
    except ValueError:
        return  # said by the config's checks
    if port is None:
        folder = Path(address.partition("://")[2]).parent
        if not folder.is_dir():
            why = "the broker makes its socket file there"
            yield problem("port", "no_folder", f"{folder} is no folder", why=why, fix=f"mkdir -p {folder}")
    elif port == 0:
        yield fine("port", "picked by the broker when it starts")
    elif reason := bind_error("" if host == "*" else host, port):
        what = f"{address}: {reason}"
        with suppress(psutil.Error):
            for found in psutil.net_connections("tcp"):
                if found.status == psutil.CONN_LISTEN and found.laddr and found.laddr.port == port and found.pid:
                    what += f", by process {found.pid} ({psutil.Process(found.pid).name()})"
        fix = "end that process, or another port in broker.address (0: a free one)"
        yield problem("port", "taken", what, why="the broker listens there", fix=fix)
    else:
        yield fine("port", f"{address} is free")


def bind_error(host: str, port: int) -> str:
    """Why no socket can listen there; '' when one can."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    except (TypeError, ValueError) as error:  # a null byte, or a name that is too long
        return str(error)
    return ""


def check_redis(config: Config) -> Iterator[Finding]:
    """Redis answers, in a version and with settings that keep what it acknowledges."""
    from broker.journal.redis_server import check_server, open_client
    from broker.journal.store import StoreUnavailable

    address = str(config.broker.redis)
    doubts: list[str] = []
    try:
        with open_client(address, config.broker.credentials) as client:
            check_server(client, address, config.broker.durability, doubts.append)
    except (SlipstreamError, StoreUnavailable) as error:
        yield problem("redis", "unfit", str(error), why="the broker's store lies there", fix="docs/redis.md")
        return
    for line in doubts:
        why = "settings that cannot be read are not checked"
        yield warning("redis", "unchecked", line, why=why, fix="docs/redis.md")
    yield fine("redis", f"{address} answers, and keeps what it acknowledges")
