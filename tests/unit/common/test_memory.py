"""The limits of containers and Slurm jobs, of both versions of cgroups."""

from pathlib import Path

import pytest

from common.process import memory


@pytest.mark.parametrize("version", [2, 1])
def test_a_limit_counts_all_that_its_processes_use_but_not_files_that_the_kernel_may_drop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """Slurm and systemd set it below the root."""
    _, limit, used, cached = memory.CGROUPS[2 - version]
    job = tmp_path / "slurm" / "job_7"
    (job / "step_0").mkdir(parents=True)
    for name, text in ((limit, "1000\n"), (used, "900\n"), ("memory.stat", f"anon 500\n{cached} 300\n")):
        (job / name).write_text(text)
    own = tmp_path / "cgroup"
    own.write_text(f"3:cpu,cpuacct:/\n{'0:' if version == 2 else '4:memory'}:/slurm/job_7/step_0\n")
    monkeypatch.setattr(memory, "OWN_CGROUPS", own)
    monkeypatch.setattr(memory, "CGROUPS", [(str(tmp_path), *names) for _, *names in memory.CGROUPS])
    assert (memory.memory_limit(), memory.free_memory()) == (1000, 400)
    (job / limit).write_text("max\n")
    assert min(memory.memory_limit(), memory.free_memory()) > 1 << 20
