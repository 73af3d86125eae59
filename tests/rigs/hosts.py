"""Hosts on one machine: processes with a network, a host name, mounts and process ids of their own, on one switch.

Nothing of the machine outside is touched. The switch is a bridge in a network namespace of its own, and names are in
/etc/hosts of each host's mounts. Everything ends with the test's process. A host sees the machine's files;
`private` and /dev/shm are its own.

`slurm` runs a real Slurm over them: slurmctld on the first, slurmd and munged on each. Its files are in the test's
folder, and the machine's /etc/slurm and /etc/munge are neither read nor written. Every host has 4 CPUs on paper.
Partition 'urgent' takes whole nodes away from partition 'all', the default.
"""

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from tests.rigs import processes
from tests.rigs.processes import OURS, ROOT
from tests.rigs.waiting import LIMIT_S, until

TOOLS = ("unshare", "nsenter", "setpriv", "ip", "mount")
SUBNET = "10.77.0"
CHECK = "mount -t tmpfs none /dev/shm && ip link add e0 type veth peer name e1"
# SIGCHLD is ignored, so the kernel reaps whatever loses its parent; the first process of a host has to.
INIT = """
set -e
trap '' CHLD
hostname "$1"
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs "$2"
mount --bind "$3" /etc/hosts
ip link set lo up
echo up
exec sleep infinity
"""
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
CONF = """
ClusterName=test
SlurmctldHost={head.name}({head.address})
AuthType=auth/munge
AuthInfo=socket={socket},cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
SlurmdTimeout=10
KillWait=30
MinJobAge=3600
SlurmUser=root
SlurmdUser=root
StateSaveLocation={state}
SlurmdSpoolDir={private}/spool
SlurmdPidFile={private}/slurmd.pid
SlurmctldPidFile={private}/slurmctld.pid
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={names} CPUs=4 RealMemory=8000 State=UNKNOWN
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes={names} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


@functools.cache
def missing() -> str:
    """Why this machine cannot have such hosts; '' when it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts in namespaces need Linux and root"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (packages util-linux and iproute2)"
    probe = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", CHECK]
    done = subprocess.run(probe, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    return f"this machine forbids namespaces: {done.stderr.strip()}" if done.returncode else ""


@dataclass
class Host:
    """One host. `pid` is the number, outside, of its first process."""

    name: str
    address: str
    private: Path  # a folder of this path on every host, with other files on each
    hub: int  # process in the network namespace of the switch
    hosts_file: Path
    port: str  # its end of the cable at the switch
    card: str  # hardware address, which stays when the host boots again
    pid: int = 0
    _outer: subprocess.Popen[str] | None = field(default=None, repr=False)

    @property
    def inside(self) -> list[str]:
        """The words before a command that runs it on this host."""
        return ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", "--pid", "--"]

    def boot(self) -> None:
        """Start the host, or start it again after `kill`."""
        words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--mount", "--pid", "--fork"]
        words += ["--mount-proc", "--kill-child", "sh", "-c", INIT, "sh"]
        words += [self.name, str(self.private), str(self.hosts_file)]
        self._outer = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._outer.stdout is not None
        with self._outer.stdout as out:
            assert out.readline() == "up\n", f"{self.name} did not start"
        (init,) = psutil.Process(self._outer.pid).children()
        self.pid = init.pid
        ports = Path(f"/proc/{self.hub}/net/dev")  # the kernel takes a dead host's cable away some time after its end
        until(lambda: f"{self.port}:" not in ports.read_text().split(), f"the last cable of {self.name} is gone")
        card = ("name", "eth0", "address", self.card, "netns", str(self.pid))
        in_hub(self.hub, "ip", "link", "add", self.port, "type", "veth", "peer", *card)
        in_hub(self.hub, "ip", "link", "set", self.port, "master", "switch", "up")
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    def kill(self) -> None:
        """kill -9 to everything on the host at once; `boot` starts it again with empty private files."""
        os.kill(self.pid, signal.SIGKILL)
        if self._outer is not None:
            self._outer.wait(LIMIT_S)

    def cut(self) -> None:
        """Take the cable out."""
        in_hub(self.hub, "ip", "link", "set", self.port, "down")

    def mend(self) -> None:
        """Put the cable back."""
        in_hub(self.hub, "ip", "link", "set", self.port, "up")

    def slow(self, rate: str, both_ways: bool = False) -> None:
        """Limit what the host may receive, and with `both_ways` also send; in tc's words, for example '100mbit'."""
        limit = ("root", "tbf", "rate", rate, "burst", "256kbit", "latency", "400ms")
        in_hub(self.hub, "tc", "qdisc", "replace", "dev", self.port, *limit)
        if both_ways:
            self.run("tc", "qdisc", "replace", "dev", "eth0", *limit)

    def carried(self) -> tuple[int, int]:
        """Bytes that the host has received and sent over its cable since it booted, with all headers."""
        lines = Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()
        (counts,) = (line.split()[1:] for line in lines if line.split()[0] == "eth0:")
        return int(counts[0]), int(counts[8])

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A command on the host, to its end."""
        done = subprocess.run([*self.inside, *words], capture_output=True, text=True, check=False, timeout=LIMIT_S)
        assert not check or done.returncode == 0, f"{self.name}: {words}: {done.stdout}{done.stderr}"
        return done

    def start(self, words: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """A command in the background; its output goes to `log`. Its pid is nsenter's: `signal_to` reaches it."""
        with log.open("ab") as out:
            return subprocess.Popen([*self.inside, *words], stdout=out, stderr=out, env={**os.environ, **(env or {})})

    def fork(self, target: Callable[..., None], *arguments: Any, log: Path) -> BaseProcess:
        """As `start`, for a function of an importable module: the fork server has imported torch already."""
        return processes.start(_on_host, self.pid, str(log), target, *arguments)

    def slipstream(self, *words: str, log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """`slipstream WORDS` in the background, with this interpreter."""
        path = OURS
        return self.start([sys.executable, "-m", "launch.cli", *words], log, path | dict(env or {}))

    def files(self, path: Path) -> Path:
        """A path on the host, as this process can read it."""
        return Path(f"/proc/{self.pid}/root") / path.relative_to("/")

    def processes(self, *words: str) -> list[psutil.Process]:
        """The host's processes whose command line contains all `words`."""
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                line = " ".join(process.cmdline())
                if os.readlink(f"/proc/{process.pid}/ns/pid") == space and all(word in line for word in words):
                    found.append(process)
        return found


def signal_to(process: subprocess.Popen[bytes] | BaseProcess, number: signal.Signals) -> None:
    """A signal to what `start` or `fork` started on a host; the process here passes none on."""
    for child in until(lambda: psutil.Process(process.pid).children(), "the host's process has started"):
        child.send_signal(number)


def enter(pid: int, spaces: Iterable[str]) -> None:
    """Move this thread into namespaces of the host whose first process is `pid`; for 'pid' its next children."""
    libc = ctypes.CDLL(None, use_errno=True)
    for space in [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in spaces]:
        assert libc.setns(space, 0) == 0, os.strerror(ctypes.get_errno())
        os.close(space)


def _on_host(pid: int, log: str, target: Callable[..., None], *arguments: Any) -> None:
    """Run `target` in a child on a host, with its output in `log`, and end after it."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(out, standard)
    enter(pid, ("net", "uts", "pid", "mnt"))
    if child := os.fork():
        os._exit(os.waitpid(child, 0)[1] != 0)
    try:
        os.chdir(ROOT)
        target(*arguments)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def in_hub(hub: int, *words: str) -> None:
    """A command in the network namespace of the switch."""
    done = subprocess.run(["nsenter", f"--target={hub}", "--net", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr}"


@contextlib.contextmanager
def hosts(folder: Path, count: int) -> Iterator[list[Host]]:
    """`count` hosts h1, h2, ... that run; their names resolve on each of them. Ends everything on them."""
    names, private = folder / "etc-hosts", folder / "private"
    private.mkdir()
    lines = [f"{SUBNET}.{10 + i} h{i}" for i in range(1, count + 1)]
    names.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
    ready = "ip link add switch type bridge && ip link set switch up && echo up && exec sleep infinity"
    words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sh", "-c", ready]
    hub = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert hub.stdout is not None
    with hub.stdout as out:
        assert out.readline() == "up\n", "the switch did not start"
    made = [
        Host(f"h{i}", f"{SUBNET}.{10 + i}", private, hub.pid, names, f"e{i}", f"02:00:00:00:00:{i:02x}")
        for i in range(1, count + 1)
    ]
    try:
        for host in made:
            host.boot()
        yield made
    finally:
        for host in made:
            with contextlib.suppress(ProcessLookupError):
                host.kill()
        hub.kill()
        hub.wait(LIMIT_S)


@functools.cache
def slurm_missing() -> str:
    """Why this machine cannot have such a Slurm; '' when it can."""
    absent = [name for name in DAEMONS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    return f"not installed: {', '.join(absent)} (Debian: slurm-wlm and munge)" if absent else ""


class Slurm:
    """A cluster that runs; `head` is the host where people type."""

    def __init__(self, folder: Path, machines: list[Host]) -> None:
        self.folder, self.hosts, self.head = folder, machines, machines[0]
        self.conf, self.key = folder / "slurm.conf", folder / "munge.key"
        self.env = {"SLURM_CONF": str(self.conf), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
        self.daemons: list[subprocess.Popen[bytes]] = []
        self._socket = self.head.private / "munge.socket"

    def start(self) -> None:
        """Write the files and start every daemon; returns when all nodes are idle."""
        (self.folder / "state").mkdir()
        self.key.write_bytes(os.urandom(128))
        self.key.chmod(0o600)
        names = ",".join(host.name for host in self.hosts)
        facts = {"head": self.head, "private": self.head.private, "socket": self._socket}
        self.conf.write_text(CONF.format(**facts, state=self.folder / "state", names=names))
        for host in self.hosts:
            self.munged(host)
        self._daemon(self.head, "slurmctld", "-D")
        for host in self.hosts:
            self.slurmd(host)
        until(lambda: self.said("sinfo", "-h", "-o", "%T").split() == ["idle"], "all nodes are idle")

    def munged(self, host: Host) -> None:
        """Start the authentication of a host that has booted."""
        own = {"pid": "pid", "log": "log", "seed": "seed"}
        words = [f"--{name}-file={host.private}/munge.{end}" for name, end in own.items()]
        words += [f"--socket={self._socket}", f"--key-file={self.key}", "--num-threads=1", "--force", "--foreground"]
        self._daemon(host, "munged", *words)
        until(lambda: host.run("test", "-S", str(self._socket), check=False).returncode == 0, "munged listens")

    def slurmd(self, host: Host) -> None:
        self._daemon(host, "slurmd", "-D", "-N", host.name)

    def said(self, *words: str) -> str:
        """The output of one of Slurm's commands; '' while the controller does not answer."""
        return self.command(*words).stdout.strip()

    def command(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """A command on the head host, to its end."""
        return self.head.run("env", *(f"{k}={v}" for k, v in {**self.env, **env}.items()), *words, check=False)

    def _daemon(self, host: Host, name: str, *words: str) -> None:
        program = shutil.which(name, path=self.env["PATH"])
        assert program is not None
        self.daemons.append(host.start([program, *words], self.folder / f"{name}-{host.name}.log", self.env))


@contextlib.contextmanager
def slurm(folder: Path, count: int) -> Iterator[Slurm]:
    """A Slurm over `count` hosts; ends everything on them."""
    with contextlib.ExitStack() as at_end:
        cluster = Slurm(folder, at_end.enter_context(hosts(folder, count)))
        try:
            cluster.start()
            yield cluster
        finally:
            at_end.close()
            for daemon in cluster.daemons:
                daemon.wait(LIMIT_S)
