"""`up` on machines with GPUs, told by what each role is started with; nvidia-smi is a script, no GPU is needed."""

import errno
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

from common.config.checks import resolve_paths
from common.config.loading import load_config
from common.config.schema import Config
from common.errors import SlipstreamError, UsageError
from common.process import install, run_dir
from common.process.versions import INSTALL_BRIDGE, versions
from launch.up import devices, ranks
from launch.up.devices import Place, assign, check_devices, rounding_problems, table
from launch.up.ranks import learner_environment
from launch.up.supervisor import RoleSpec, Supervisor
from launch.up.up import role_specs
from tests.rigs.configs import prepared, refusal, write_job
from tests.rigs.device import rank_environment
from tests.rigs.processes import ROOT
from tests.rigs.refusals import refused
from tests.rigs.waiting import until

QWEN = ROOT / "configs" / "qwen3-0.6b-gsm8k.yaml"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository's root on a machine of 8 GPUs, with both GPU environments."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    lines = "".join(f"GPU-{i}aaaa-bb, NVIDIA H100 80GB HBM3\\n" for i in range(8))
    answers = f"*compute_cap) echo 9.0;; *driver_version) echo 550.54.15;; *) printf '{lines}'"
    smi.write_text(f"#!/bin/sh\ncase $1 in {answers};; esac\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:/usr/bin:/bin")
    for name in ("learner", "rollout"):
        environment(tmp_path / f".venv-{name}", "12.8")
    return tmp_path


def environment(prefix: Path, cuda: str | None) -> None:
    torch = prefix / "lib" / "python3.11" / "site-packages" / "torch"
    torch.mkdir(parents=True)
    (torch / "version.py").write_text(f"__version__ = '2'\ncuda: Optional[str] = {cuda!r}\n")
    (prefix / "bin").mkdir()
    (prefix / "bin" / "python").symlink_to(sys.executable)


GLOO = ("weights.transport=gloo", "weights.buffers=host")
CACHE = "rollout.engine.kv_cache_mib=64"


def job(tmp_path: Path, *overrides: str) -> Config:
    return resolve_paths(load_config(QWEN, [f"run.dir={tmp_path / 'run'}", *overrides]))


def test_the_gsm8k_config_is_one_command_on_eight_gpus(machine: Path, tmp_path: Path) -> None:
    config = job(tmp_path)
    places = assign(config, {}, machine)
    broker, learner, *nodes = role_specs(config, prepared(config), places)
    assert broker.argv[0] == sys.executable and "CUDA_VISIBLE_DEVICES" not in broker.env
    assert learner.argv[0] == str(machine / ".venv-learner/bin/python")
    assert learner.env == {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert [node.env["CUDA_VISIBLE_DEVICES"] for node in nodes] == ["4", "5", "6", "7"]
    assert all(node.argv[0] == str(machine / ".venv-rollout/bin/python") for node in nodes)
    assert all(node.env["OMP_NUM_THREADS"] == "1" for node in nodes)
    lines = [line.split() for line in table(places, machine)]
    assert lines[:2] == [
        ["learner", "0,1,2,3", ".venv-learner/bin/python"],
        ["node-0", "4", ".venv-rollout/bin/python"],
    ]


def test_engines_of_several_devices_get_them_behind_the_learner_within_what_the_caller_allows(
    machine: Path, tmp_path: Path
) -> None:
    engine = ["rollout.engine.tensor_parallel=2", "rollout.engine.pipeline_parallel=2", "rollout.nodes=1"]
    config = job(tmp_path, "learner.world_size=2", *engine)
    allowed = {"CUDA_VISIBLE_DEVICES": "7,GPU-2aaaa,5,GPU-1aaaa-bb,3,0"}
    found = {role: place.env["CUDA_VISIBLE_DEVICES"] for role, place in assign(config, allowed, machine).items()}
    assert found == {"learner": "7,GPU-2aaaa", "node-0": "5,GPU-1aaaa-bb,3,0"}


@pytest.mark.parametrize("visible", ["6,7", "0,1,-1,2,3,4,5,6,7", "0,1,GPU-x,2", "0,1,1,2", "0,1,8,2"])
def test_too_few_devices_are_refused_with_what_is_needed_found_and_to_be_lowered(
    machine: Path, tmp_path: Path, visible: str
) -> None:
    with pytest.raises(UsageError) as refused:
        assign(job(tmp_path), {"CUDA_VISIBLE_DEVICES": visible}, machine)
    for words in ("needs 8 GPUs, found 2", visible, "learner.world_size (4)", "rollout.nodes", "tensor_parallel"):
        assert words in str(refused.value)


def test_up_refuses_before_anything_is_started(machine: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr("launch.up.up.assign", partial(assign, root=machine))
    assert "CUDA_VISIBLE_DEVICES=3" in refusal(capsys, "up", str(write_job(tmp_path)))
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_role_without_an_environment_of_its_own_uses_this_one(machine: Path, tmp_path: Path) -> None:
    (machine / ".venv-rollout").rename(machine / "gone")
    places = assign(job(tmp_path), {}, machine)
    assert places["learner"].env == {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert places["node-0"] == Place()  # torch here is for the CPU


def test_nothing_changes_without_a_gpu(machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert assign(job(tmp_path), {"CUDA_VISIBLE_DEVICES": ""}, machine) == {}
    monkeypatch.setenv("PATH", "/nowhere")
    assert assign(job(tmp_path), {}, machine) == {}
    config = job(tmp_path)
    specs = role_specs(config, prepared(config), {})
    assert all(spec.argv[0] == sys.executable and devices.VISIBLE not in spec.env for spec in specs)


def test_gpus_that_do_not_answer_are_no_missing_gpus(machine: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(devices, "NVIDIA_SMI_S", 0.2)
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 600\n")
    with refused(SlipstreamError, "nvidia-smi", "0.2 s"):
        assign(job(tmp_path), {}, machine)


def test_roles_with_gpus_keep_all_cores_of_a_small_machine(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.up.up.available_cores", lambda: [*range(16)])
    config = job(tmp_path, "learner.world_size=1", "rollout.nodes=1", CACHE, *GLOO)

    def cores(visible: str) -> list[devices.Cores]:
        places = assign(config, {"CUDA_VISIBLE_DEVICES": visible}, machine, share=True)
        _, learner, node = role_specs(config, prepared(config), places)
        return [learner.cores, node.child_cores]

    assert cores("") == [{0}, {1}]
    assert cores("0") == [None, None]


@pytest.mark.slow
def test_a_restarted_role_keeps_its_devices(tmp_path: Path) -> None:
    told = tmp_path / "told"
    command = ["sh", "-c", f"echo $CUDA_VISIBLE_DEVICES >> {told}; exit 1"]
    supervisor = Supervisor(lambda kind, detail: None)
    env = {"CUDA_VISIBLE_DEVICES": "4,5"}
    supervisor.start(RoleSpec("node-0", command, tmp_path / "log", env, max_restarts=1))
    until(lambda: bool(supervisor.poll()), "the role gave up")
    assert told.read_text().split() == ["4,5", "4,5"]


def test_roles_may_share_the_only_gpu(machine: Path, tmp_path: Path) -> None:
    config, alone = job(tmp_path, "learner.world_size=1", CACHE, *GLOO), {"CUDA_VISIBLE_DEVICES": "3"}
    with refused(UsageError, "With --share-gpus"):
        assign(config, alone, machine)
    places = assign(config, alone, machine, share=True)
    assert {place.env["CUDA_VISIBLE_DEVICES"] for place in places.values()} == {"3"}
    assert places["learner"].python == str(machine / ".venv-learner/bin/python")
    with refused(UsageError, "2 GPUs", "found 1"):
        assign(job(tmp_path, "learner.world_size=2", CACHE, *GLOO), alone, machine, share=True)


def test_a_shared_gpu_needs_an_engine_whose_cache_has_a_size_of_its_own(machine: Path, tmp_path: Path) -> None:
    words = ["learner.world_size=1", *GLOO]
    with refused(UsageError, "--share-gpus", "rollout.engine.kv_cache_mib", "MiB"):
        assign(job(tmp_path, *words), {}, machine, share=True)
    assert assign(job(tmp_path, *words, "rollout.nodes=0"), {}, machine, share=True), "its nodes run elsewhere"


def test_nccl_on_a_shared_gpu_is_refused_unless_each_role_gets_a_host_of_its_own(
    machine: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    alone, nccl = {"CUDA_VISIBLE_DEVICES": "3"}, ["learner.world_size=1", "weights.transport=nccl", CACHE]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    monkeypatch.setattr("launch.up.up.assign", partial(assign, root=machine))
    said = refusal(capsys, "up", str(write_job(tmp_path)), "weights.transport=nccl", "--share-gpus")
    assert "weights.transport=gloo" in said and "NCCL_HOSTID" in said
    places = assign(job(tmp_path, *nccl), alone | {"NCCL_HOSTID": "box"}, machine, share=True)
    found = [place.env["NCCL_HOSTID"] for place in places.values()]
    assert found == ["box-learner", *(f"box-node-{n}" for n in range(4))]
    apart = assign(job(tmp_path, *nccl), {"NCCL_HOSTID": "box"}, machine)
    assert all("NCCL_HOSTID" not in place.env for place in apart.values())


@pytest.mark.parametrize(
    ("capability", "layout", "queues"),
    [
        ("9.0", ["parallel.tensor=2"], "1"),
        ("8.6", ["parallel.context=2"], "1"),
        ("9.0", [], None),
        ("10.0", ["parallel.tensor=2"], "32"),
        ("12.0", ["parallel.tensor=4"], None),  # one group, nothing else communicates
        ("[N/A]", ["parallel.tensor=2"], None),
    ],
)
def test_ranks_get_the_queues_that_megatron_wants_on_their_devices(
    machine: Path, tmp_path: Path, capability: str, layout: list[str], queues: str | None
) -> None:
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.write_text(smi.read_text().replace("9.0", capability))
    config = job(tmp_path, *(f"learner.{word}" for word in layout))
    assert learner_environment(config, {}).get("CUDA_DEVICE_MAX_CONNECTIONS") == queues
    own = learner_environment(config, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"})
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in own, "the caller's stays"


def test_torchrun_gets_the_environment_of_the_ranks(machine: Path, tmp_path: Path, monkeypatch) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(ranks.os, "execvpe", lambda program, command, env: started.append(env))
    config = job(tmp_path, "learner.parallel.tensor=2", "learner.threads=3")
    ranks.become_torchrun(config, prepared(config))
    given = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "OMP_NUM_THREADS": "3"}
    assert given.items() <= started[0].items()


def test_a_learner_waits_for_room_before_it_starts(machine: Path, tmp_path: Path, monkeypatch, capfd) -> None:
    config, tries = job(tmp_path), [OSError(errno.EDQUOT, "quota"), OSError(errno.ENOSPC, "full")]
    run, dump = prepared(config), run_dir.dump_yaml

    def written(config: Config) -> str:
        if tries:
            raise tries.pop()
        return dump(config)

    monkeypatch.setattr(run_dir, "dump_yaml", written)
    monkeypatch.setattr(ranks, "ROOM_S", 0.0)
    started: list[str] = []
    monkeypatch.setattr(ranks.os, "execvpe", lambda program, command, env: started.append(program))
    ranks.become_torchrun(config, run)
    assert started and not tries
    assert capfd.readouterr().err.count("the learner starts when there is room") == 1


def test_a_learner_waits_for_room_also_when_its_log_is_on_the_full_disk(tmp_path: Path, monkeypatch) -> None:
    config, tries = job(tmp_path), [OSError(errno.ENOSPC, "full")] * 2
    run, dump = prepared(config), run_dir.dump_yaml
    monkeypatch.setattr(run_dir, "dump_yaml", lambda config: full() if tries and tries.pop() else dump(config))
    monkeypatch.setattr(ranks, "ROOM_S", 0.0)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=full, flush=full))
    ranks.prepare(config, run)
    assert not tries


def full(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "full")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_pinned_memory_is_not_rounded_up_beside_the_callers_settings(tmp_path: Path, name: str) -> None:
    config, option = job(tmp_path), "pinned_max_cached_size_mb"
    given = learner_environment(config, {name: "expandable_segments:True"})
    assert given["PYTORCH_ALLOC_CONF"] == f"expandable_segments:True,{option}:1"
    assert learner_environment(config, {})["PYTORCH_ALLOC_CONF"] == f"{option}:1"
    assert "PYTORCH_ALLOC_CONF" not in learner_environment(config, {name: f"{option}:8"})


def test_torch_reads_the_size_above_which_pinned_memory_is_not_rounded() -> None:
    """A word that it does not know is left alone without a device; a wrong size of one that it knows is refused."""
    set_to = torch._C._accelerator_setAllocatorSettings
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        set_to("no_such_word:many")
        with pytest.raises(ValueError, match="sto"):
            set_to("pinned_max_cached_size_mb:many")
    finally:
        set_to(before)


def test_a_learner_without_the_bridge_says_how_it_is_installed(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(install, "versions", lambda: versions() | {"megatron-bridge": ""})
    said = refusal(capsys, "learner", str(write_job(tmp_path)))
    assert "needs megatron-bridge" in said
    assert "launch/setup.sh learner" in said, "a checkout"
    assert INSTALL_BRIDGE in install.advice("learner", None), "a wheel"


def test_ranks_of_tests_share_the_gpus_that_there_are() -> None:
    found = [rank_environment(rank, 4, 2) for rank in range(4)]
    assert [one["LOCAL_RANK"] for one in found] == ["0", "1", "0", "1"]
    assert len({one["NCCL_HOSTID"] for one in found}) == 4
    assert "NCCL_HOSTID" not in rank_environment(1, 2, 2) | rank_environment(1, 2, 0)


def test_a_driver_that_is_older_than_torchs_cuda_is_refused_before_a_role_would_run_on_the_cpu(
    machine: Path, tmp_path: Path
) -> None:
    torch = machine / ".venv-rollout" / "lib" / "python3.11" / "site-packages" / "torch" / "version.py"
    torch.write_text("cuda: Optional[str] = '13.0'\n")
    with refused(UsageError, "CUDA 13.0", "580", "550.54.15", ".venv-rollout"):
        assign(job(tmp_path), {}, machine)


def test_a_role_that_wants_more_gpus_than_its_machine_has_is_refused_with_both_numbers(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_devices(16, "learner.world_size", {})  # torch is for the CPU here
    monkeypatch.setattr(devices, "torch_cuda", lambda: "12.8")
    check_devices(8, "learner.world_size", {})
    with refused(UsageError, "learner.world_size", "GPUs of this machine, 2 in CUDA_VISIBLE_DEVICES=0,1", "found 4"):
        check_devices(4, "learner.world_size", {"CUDA_VISIBLE_DEVICES": "0,1"})
    monkeypatch.setattr(devices, "torch_cuda", lambda: "13.0")
    with refused(UsageError, "580", "550.54.15"):
        check_devices(1, "learner.world_size", {})


@pytest.mark.parametrize(("capability", "fits"), [("8.0", False), ("8.9", True), ("9.0", True), ("[N/A]", True)])
def test_a_gpu_that_does_not_multiply_in_8_bits_refuses_rounded_weights(
    machine: Path, tmp_path: Path, capability: str, fits: bool
) -> None:
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.write_text(smi.read_text().replace("9.0", capability))
    rounding = job(tmp_path, "rollout.engine.quantization=fp8_per_channel")
    assert [wrong.key for wrong in rounding_problems(rounding)] == ([] if fits else ["rollout.engine.quantization"])
    assert list(rounding_problems(job(tmp_path))) == []
