"""A real Slurm over the hosts of hosts.py: slurmctld on the first of them, slurmd and munged on each.

Everything it needs is in the test's folder, and the machine's /etc/slurm and /etc/munge are neither read nor written.
Every host has 4 CPUs on paper. Partition 'urgent' takes whole nodes away from partition 'all', the default.
"""

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.hosts import Host, hosts
from tests.waiting import LIMIT_S, until

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
