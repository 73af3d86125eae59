"""The hosts of the other tests here: what is their own, what reaches whom, and how they die."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.rigs.hosts import Host, hosts
from tests.rigs.waiting import LIMIT_S, until

CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 9), 2)"


def reaches(host: Host, name: str) -> bool:
    """Whether packets to a host come back: a refusal is an answer."""
    return "refused" in host.run("python3", "-c", CONNECT, name, check=False).stderr


def test_hosts_share_files_and_a_switch_and_nothing_else(tmp_path: Path) -> None:
    with hosts(tmp_path, 2) as (one, two):
        one.run("touch", str(tmp_path / "shared"), str(one.private / "own"), "/dev/shm/own")
        assert two.run("ls", str(tmp_path / "shared")).stdout
        assert not two.run("ls", str(two.private), "/dev/shm").stdout.count("own")
        assert [host.run("hostname").stdout for host in (one, two)] == ["h1\n", "h2\n"]
        assert not two.processes("sleep", "1234")
        sleeper = two.start(["sleep", "1234"], tmp_path / "log")
        assert reaches(one, "h2")
        two.cut()
        assert not reaches(one, "h2")
        two.mend()
        assert reaches(one, "h2")
        two.kill()
        assert sleeper.wait() != 0
        assert not reaches(one, "h2")
        two.boot()
        assert reaches(one, "h2")
        assert not two.processes("sleep", "1234")


def test_a_host_boots_again_when_the_kernel_has_taken_its_old_cable_away(tmp_path: Path) -> None:
    with hosts(tmp_path, 2) as (one, two), ThreadPoolExecutor(1) as pool:
        with open(f"/proc/{two.pid}/ns/net", "rb"):  # while it is open the kernel keeps the cable
            old = two.pid
            two.kill()
            booting = pool.submit(two.boot)
            until(lambda: two.pid != old or booting.done(), "the host's first process has started again")
        booting.result(LIMIT_S)
        assert reaches(one, "h2")
