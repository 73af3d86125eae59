"""`slipstream sft` on two machines: refusals, a machine that is killed, a stop, and the weights of one machine."""

import signal
from pathlib import Path
from subprocess import Popen

import yaml

from common.security.credentials import KeyFolder
from launch.keys import make
from tests.integration.learner.test_sft_resume import WarmStart
from tests.rigs import tiny_models
from tests.rigs.hosts import Host, hosts, signal_to
from tests.rigs.jobs import weights_of
from tests.rigs.machines import weights_in
from tests.rigs.waiting import LIMIT_S, until

PORT, STEPS, EVERY, TIMEOUT_S = 5566, 200, 10, 20.0
LISTEN, LOOPBACK = "0A", "0100007F"


class Machines:
    """A warm start of two ranks: as one machine in `quiet`, and over the hosts, which share only checkpoints."""

    def __init__(self, folder: Path, hosts: list[Host]) -> None:
        self.folder, (self.broker_host, *self.hosts) = folder, hosts
        tiny_models.write_chat_model(folder / "model", "tied")
        make(KeyFolder(folder / "keys"), [])
        self.quiet = WarmStart(folder / "quiet", folder / "model", {"every": EVERY}, world_size=2, timeout_s=TIMEOUT_S)
        document = yaml.safe_load(self.quiet.config.read_text())
        document["run"]["steps"] = STEPS
        self.quiet.config.write_text(yaml.safe_dump(document))
        self.own, self.checkpoints = self.broker_host.private / "run", folder / "checkpoints"
        document["run"]["dir"] = str(self.own)
        document["learner"] |= {"machines": 2, "checkpoint": {"every": EVERY, "dir": str(self.checkpoints)}}
        self.address = f"tcp://{self.broker_host.address}:{PORT}"
        document["broker"] = {"address": self.address, "credentials": str(folder / "keys")}
        self.config = folder / "machines.yaml"
        self.config.write_text(yaml.safe_dump(document))

    def start(self, host: Host, role: str, *words: str) -> Popen[bytes]:
        return host.slipstream(role, str(self.config), *words, log=self.folder / f"{host.name}.out")

    def quiet_run(self, host: Host) -> set[str]:
        """The same run on one machine, which nothing disturbs; returns the addresses on which its ranks listened."""
        alone = host.slipstream("sft", str(self.quiet.config), log=self.folder / "quiet.out")
        until(lambda: len(self.quiet.lines()) > EVERY, "the quiet run to train", told=self.logs, every_s=0.1)
        found = listening(host)
        assert alone.wait(LIMIT_S) == 0, self.logs()
        return found

    def said(self, host: Host) -> str:
        return (self.folder / f"{host.name}.out").read_text(errors="replace")

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-2500:]}" for path in self.folder.glob("*.out"))

    def newest(self) -> int:
        """The step of the newest whole checkpoint."""
        found = [path for path in self.checkpoints.glob("step-*") if (path / "trainer.json").is_file()]
        return max((int(path.name.removeprefix("step-")) for path in found), default=0)

    def trains_beyond(self, step: int) -> int:
        until(lambda: self.newest() > step, f"a checkpoint beyond {step}", told=self.logs)
        return self.newest()


def listening(host: Host) -> set[str]:
    """Addresses on which anything on the host listens, as the kernel writes them."""
    files = [Path(f"/proc/{host.pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    return {line.split()[1].partition(":")[0] for lines in files for line in lines if line.split()[3] == LISTEN}


def test_a_warm_start_on_two_machines_survives_one_of_them_and_ends_with_the_weights_of_one(tmp_path: Path) -> None:
    with hosts(tmp_path, 3) as found:
        rig = Machines(tmp_path, found)
        one, two = rig.hosts
        broker = rig.start(rig.broker_host, "broker")
        first = rig.start(one, "sft")
        until(lambda: "1 of 2 here" in rig.said(one), "the first machine to wait", told=rig.logs)
        assert rig.start(two, "sft", "run.seed=4").wait(LIMIT_S) == 2
        assert "run.seed is" in rig.said(two)
        (tmp_path / "others.jsonl").write_text(rig.quiet.rows.read_text() + '{"prompt": "a", "completion": "b"}\n')
        words = f"tasks.dataset={tmp_path / 'others.jsonl'}", f"run.dir={rig.own}-refused"
        assert rig.start(two, "sft", *words).wait(LIMIT_S) == 2
        assert "tasks.dataset: h3" in rig.said(two)

        second = rig.start(two, "sft")
        before = rig.trains_beyond(EVERY)
        one.kill()  # the lead rank's machine, where the ranks meet
        first.wait(LIMIT_S)
        one.boot()
        first = rig.start(one, "sft")
        stopped = rig.trains_beyond(max(before, rig.newest()))
        assert stopped < STEPS
        asked = ("stop", rig.address, "--credentials", str(tmp_path / "keys"))
        stop = rig.broker_host.slipstream(*asked, log=tmp_path / "stop.out")
        assert [each.wait(LIMIT_S) for each in (stop, first, second, broker)] == [0] * 4, rig.logs()
        assert before < rig.newest() < STEPS

        broker = rig.start(rig.broker_host, "broker")
        launchers = [rig.start(host, "sft") for host in rig.hosts]
        assert [each.wait(LIMIT_S) for each in launchers] == [0, 0], rig.logs()
        signal_to(broker, signal.SIGTERM)
        assert broker.wait(LIMIT_S) == 0, rig.logs()
        listened = rig.quiet_run(one)
        assert listened == {LOOPBACK}, "the ranks of one machine need no other address"
        models = [path for host in rig.hosts for path in [host.files(rig.own) / "model"] if path.is_dir()]
        assert {weights_in(path) for path in models} == {weights_of(rig.quiet.run)}
