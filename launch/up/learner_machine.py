"""`slipstream learner` or `sft` on one of several machines: it runs its ranks in the rounds that the broker forms.

The broker is the only address that a machine needs. Each launcher binds a rendezvous store and announces it with its
reports. The torchrun processes of a round meet at the store of its first machine, in the order that the broker said
(learner/rendezvous.py). When a round is over, the launcher kills its ranks and waits for the next one, which starts
from the newest checkpoint.
"""

import contextlib
import hashlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from broker.client.calls import LearnerBroker
from broker.client.connect import Access, connect
from broker.contract import MachineReport, Member, RendezvousOrder
from broker.delivery.learner_machines import FENCE_S, INTERFACE
from common.config.checks import downloaded
from common.config.schema import BaseConfig
from common.errors import EXIT_DONE, EXIT_FAILED, BrokerError, BrokerUnreachable, HopelessError, UsageError
from common.json_lines import dataset_rows
from common.process.lifecycle import DrainFlag
from common.process.local_address import bracketed
from common.process.logs import log_end, log_path, setup_logging
from common.process.run_dir import RunDir
from common.process.versions import versions
from launch.cluster.interface import NCCL, Interface, interface_for
from launch.up.ranks import learner_environment, prepare, torchrun
from launch.up.supervisor import Role, RoleSpec
from learner.loop.run_files import LearnerRecord, read_record

logger = logging.getLogger(__name__)

REPORT_S = 1.0
POLL_S = 0.1
SHOWN_S = 30.0  # network file systems show a new file after seconds
SEEK_S = 0.5
ANSWER_S = 3.0  # the deadline of a report
RETRY_S = 1.0  # the pause before it is repeated
# May differ, as the patch level of Python may; a preflight says so. NCCL_DEBUG stands for NCCL_DEBUG_FILE, too.
OWN_SETTINGS = ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG", "NCCL_TOPO_FILE")


def run_machine(config: BaseConfig, run: RunDir, address: str) -> int:
    """Run the ranks of this machine for the job of the broker at `address`; returns the exit code.

    Raises UsageError when the machines do not fit together, HopelessError when too few of them come.
    """
    interface = interface_for(address, config.learner.interface)
    prepare(config, run)
    host = socket.gethostname()
    setup_logging("launcher", host, run.logs, config.telemetry.log_level)
    logger.info("%s: the ranks use interface %s (%s)", host, interface.name, interface.address)
    interface.use(named=config.learner.interface is not None)
    if (chosen := os.environ[NCCL]) != f"={interface.name}":
        logger.info("NCCL uses %s, as %s says", chosen, NCCL)
    store = interface.listen()  # lives as long as this function runs
    access = Access(
        address=address, role="learner", deadline_s=ANSWER_S, retry_s=RETRY_S, credentials=config.broker.credentials
    )
    report = MachineReport(
        machine=secrets.token_hex(8),
        host=host,
        address=interface.address,
        endpoint=f"{bracketed(interface.address)}:{store.port}",
        facts=facts(config, interface),
        wanted=config.learner.machines,
        max_restarts=config.run.max_restarts,
    )
    with connect(access) as client, SharedFolder(run.checkpoints, report.machine) as shared:
        return Launcher(config, run, client, shared, report).run(address)


def facts(config: BaseConfig, interface: Interface) -> dict[str, str]:
    """Versions and settings that must be the same on every machine of the learner."""
    same = {name: version for name, version in versions().items() if name != "vllm"}
    same["python"] = same["python"].rpartition(".")[0]
    # a run may change these, but every machine alike
    keys = ("machines", "world_size", "micro_batch_tokens", "timeout_s")
    same |= {f"learner.{key}": str(getattr(config.learner, key)) for key in keys}
    same["model.verify"] = str(config.model.verify)
    same["learner.parallel"] = msgspec.json.encode(config.learner.parallel).decode()
    if config.rl is None:  # every rank reads its machine's copy
        path = Path(downloaded(config, "learner").tasks.dataset)
        rows = hashlib.sha256()
        for _, row in dataset_rows(path, "tasks.dataset"):
            rows.update(row + b"\n")
        same["rows of tasks.dataset"] = rows.hexdigest()[:16]
    else:  # ranks that disagree would enter different collectives
        weights = config.rl.weights
        same |= {"weights.encoding": weights.encoding, "weights.transport": weights.transport}
    if config.learner.interface is None:
        same[INTERFACE] = interface.name
    names = sorted(name for name in os.environ if name.startswith("NCCL_") and not name.startswith(OWN_SETTINGS))
    return same | {name: os.environ[name] for name in names[:32]}


def rank_command(config: BaseConfig, run: RunDir, report: MachineReport, broker: str) -> list[str]:
    """torchrun with the ranks of this machine in the round of `report`."""
    machines = config.learner.machines
    wait_s = int(max(config.learner.timeout_s, FENCE_S))
    options = {"nnodes": machines, "nproc-per-node": config.learner.world_size // machines}
    options |= {"local-addr": report.address, "rdzv-endpoint": report.members[0].endpoint}
    place = [member.machine for member in report.members].index(report.machine)
    options |= {"rdzv-id": f"{config.run.name}-{report.round}", "rdzv-conf": f"rank={place},timeout={wait_s}"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return torchrun(run, words, ["--broker", broker, "--address", report.address])


class SharedFolder:
    """Whether machines share a folder: each leaves a file, which the context removes, and looks for the others'."""

    def __init__(self, folder: Path, machine: str) -> None:
        self._folder = folder
        self._own = folder / f".machine-{machine}"

    def __enter__(self) -> "SharedFolder":
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._own.touch()
        except OSError as error:
            raise UsageError(f"learner.checkpoint.dir: {self._folder} cannot be written: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._own.unlink()

    def check(self, members: Sequence[Member], pause: Callable[[float], bool]) -> None:
        """Raise UsageError when the file of a member does not appear; `pause` sleeps and returns whether to give up."""
        absent = list(members)
        for _ in range(int(SHOWN_S / SEEK_S)):
            with contextlib.suppress(OSError):  # a network file system may not answer for a while
                absent = [member for member in absent if not (self._folder / f".machine-{member.machine}").exists()]
            if not absent or pause(SEEK_S):
                return
        hosts = ", ".join(member.host for member in absent)
        theirs = f"the folder that {hosts} {'has' if len(absent) == 1 else 'have'} under that name"
        where = f"{self._folder} on this machine is not {theirs}"
        raise UsageError(f"learner.checkpoint.dir: {where}; set it to one that all machines share")


class Launcher:
    """The loop of one machine: report, do what the broker answers, look after the ranks."""

    def __init__(
        self, config: BaseConfig, run: RunDir, client: LearnerBroker, shared: SharedFolder, report: MachineReport
    ) -> None:
        self._config = config
        self._run = run
        self._client = client
        self._shared = shared
        self._report = report
        self._ranks: Role | None = None
        self._answered = self._waiting_since = time.monotonic()
        self._said = ""
        self._drained = False  # the ranks of this round were told to drain
        self._log_rank = -1  # whose log the broker asked for
        self._logs_before = self._log_sizes()  # those of earlier rounds
        self._record_before: LearnerRecord | None = None  # that of earlier rounds

    def run(self, broker: str) -> int:
        """Until the job has ended or this machine was told to leave; returns the exit code. Raises as `run_machine`."""
        flag = DrainFlag.install(on_second=self._kill)
        try:
            while True:
                told = self._tell(leaving=flag.is_set)
                if told is not None and told.exit_code is not None:
                    return self._end(told)
                self._follow(told, flag, broker)
                if flag.is_set and not self._report.running:
                    logger.info("%s: this machine leaves", flag.reason)
                    return EXIT_DONE
                self._rest(flag)
        finally:
            self._kill()
            if self._report.running:
                self._ended(EXIT_FAILED)
            self._tell(leaving=True)

    def _tell(self, **changes: object) -> RendezvousOrder | None:
        """Report; returns the answer, None while the broker does not answer. Raises UsageError when it refuses."""
        self._report = msgspec.structs.replace(self._report, **changes)
        sent_at = time.monotonic()  # the broker counts this machine's silence from here on, or later
        try:
            told = self._client.gather(self._report, self._log_end(), self._log_rank)
        except BrokerUnreachable as error:
            self._say(f"the broker does not answer: {error}")
            return None
        except BrokerError as error:
            raise UsageError(str(error)) from None
        self._answered = sent_at
        self._log_rank = told.log_rank
        return told

    def _log_end(self) -> str | None:
        """The end of the log that the broker asked for; None when no rank here has written it in its last round."""
        path = log_path(self._run.logs, "learner", str(self._log_rank))
        changed = _bytes(path) != self._logs_before.get(path, 0)
        return log_end(path) if self._log_rank >= 0 and changed else None

    def _log_sizes(self) -> dict[Path, int]:
        return {path: _bytes(path) for path in self._run.logs.glob("learner-*")}

    def _follow(self, told: RendezvousOrder | None, flag: DrainFlag, broker: str) -> None:
        """Start, drain or kill the ranks as the broker says."""
        learner = self._config.learner
        if told is None:
            if self._report.running and time.monotonic() - self._answered > FENCE_S:
                self._give_up(f"the broker has not answered for {FENCE_S:g} s, so another round may begin")
        elif self._report.running and told.round != self._report.round:
            self._give_up(told.reason or "the round is over")
        elif self._report.running and told.drain and not self._drained:
            assert self._ranks is not None
            self._drained = True
            self._ranks.terminate()
        elif told.round > self._report.round and not flag.is_set:
            self._start(told, flag, broker)
        elif not self._report.running and not told.active:
            self._say(f"waiting for machines: {told.machines} of {learner.machines} here. {told.reason}".strip())
        else:
            self._waiting_since = time.monotonic()
            if told.round == 0:
                self._say("a spare machine: the others train")
        if not self._report.running and time.monotonic() - self._waiting_since > learner.machines_wait_s:
            raise HopelessError(f"{self._said}; waited {learner.machines_wait_s:g} s (learner.machines_wait_s)")

    def _start(self, told: RendezvousOrder, flag: DrainFlag, broker: str) -> None:
        """Start this machine's ranks of a round, or report why that cannot be."""
        self._report = msgspec.structs.replace(self._report, round=told.round, members=told.members, exit_code=0)
        hosts = ", ".join(member.host for member in told.members)
        logger.info("round %d: %s; rendezvous at %s", told.round, hosts, told.members[0].endpoint)
        try:
            self._shared.check(told.members, flag.wait)
        except UsageError as error:
            self._tell(exit_code=error.exit_code, reason=str(error))
            raise
        self._report = msgspec.structs.replace(self._report, running=True)
        self._drained = False
        self._logs_before = self._log_sizes()
        self._record_before = read_record(self._run)
        log = log_path(self._run.logs, "torchrun", self._report.host)
        command = rank_command(self._config, self._run, self._report, broker)
        self._ranks = Role(RoleSpec("ranks", command, log, learner_environment(self._config)))

    def _rest(self, flag: DrainFlag) -> None:
        """Wait until the next report is due, or something has happened."""
        end = time.monotonic() + REPORT_S
        leaving = flag.is_set
        while time.monotonic() < end and flag.is_set == leaving:
            if self._ranks is not None and self._ranks.poll():
                code = self._ranks.exit_code
                assert code is not None
                self._ended(code if code >= 0 else EXIT_FAILED)
                return
            if leaving:
                time.sleep(POLL_S)
            else:
                flag.wait(POLL_S)

    def _give_up(self, reason: str) -> None:
        logger.warning("this machine's ranks are killed: %s", reason)
        self._kill()
        self._ended(EXIT_FAILED)

    def _ended(self, exit_code: int) -> None:
        self._waiting_since = time.monotonic()
        leads = [member.machine for member in self._report.members[:1]] == [self._report.machine]
        record = read_record(self._run)
        state = record.state if leads and record is not None and record != self._record_before else ""
        self._report = msgspec.structs.replace(self._report, running=False, exit_code=exit_code, state=state)
        logger.info("this machine's ranks have ended with exit code %d", exit_code)

    def _kill(self) -> None:
        if self._ranks is not None:
            self._ranks.kill()

    def _end(self, told: RendezvousOrder) -> int:
        """The job has ended, or this machine does not fit."""
        assert told.exit_code is not None
        level = logging.INFO if told.exit_code == EXIT_DONE else logging.ERROR
        logger.log(level, "the job has ended: %s", told.reason)
        if self._report.running:
            self._give_up("the job has ended")
        return told.exit_code

    def _say(self, text: str) -> None:
        """Log what this machine waits for, once."""
        if text != self._said:
            self._said = text
            logger.info("%s", text)


def _bytes(path: Path) -> int:
    """Size of a file; 0 where there is none, or its file system does not answer."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
