"""check_bare_install.py CHECKOUT: run by check_bare_install.sh, where a wheel is installed with base dependencies only.

common, broker and launch must import, and `slipstream --help` must take less than a second. The light commands must
work. Every other command must name the extra that it needs, with exit code 2.
"""

import importlib
import importlib.util
import json
import pkgutil
import subprocess
import sys
import timeit
from functools import partial
from importlib import metadata
from pathlib import Path

LIMIT_S = 60.0
HELP_S = 1.0
ATTEMPTS = 3
ABSENT = ("torch", "vllm", "megatron", "transformers", "matplotlib", "redis")
LEFT_OUT = ("common.weights", "launch.web", "launch.results.plots")  # they need extras
PACKAGES = ("common", "broker", "launch", "learner", "rollout_fleet")
NOT_CODE = (".sh", ".md", ".yaml", ".yml", ".json", "")  # scripts and manifests, which a clone is for
COMMAND = Path(sys.executable).with_name("slipstream")
JOB = """
run: {name: bare, dir: run, steps: 1}
model: {path: model}
tasks: {environment: addition, dataset: data.jsonl}
learner: {groups_per_step: 2}
rollout: {group_size: 2, max_tokens: 8, engine: {max_model_len: 64}}
"""


def main(checkout: Path) -> int:
    """Exit code 1 with a reason when a check fails."""
    if present := [name for name in ABSENT if importlib.util.find_spec(name) is not None]:
        return fail(f"not a bare install: {', '.join(present)} can be imported")
    imported = 0
    for package in ("common", "broker", "launch"):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not module.name.startswith(LEFT_OUT):
                importlib.import_module(module.name)
                imported += 1
    run = partial(subprocess.run, [COMMAND, "--help"], check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
    best = min(timeit.repeat(run, number=1, repeat=ATTEMPTS))
    print(f"{imported} modules import without {', '.join(ABSENT)}; slipstream --help takes {best:.2f} s")
    if best > HELP_S:
        return fail(f"slipstream --help must take less than {HELP_S} s")
    missing = missing_files(checkout)
    return fail(f"the wheel lacks {', '.join(missing)}") if missing else check_commands(checkout)


def fail(why: str) -> int:
    print(why)
    return 1


def missing_files(checkout: Path) -> list[str]:
    """Files beside the code of the checkout that the wheel does not have; nothing must come from the checkout."""
    site = Path(importlib.import_module("common").__file__ or "").parents[1]
    assert site.is_relative_to(sys.prefix), f"{site} is not in {sys.prefix}"
    files = (file for name in PACKAGES for file in (checkout / name).rglob("*") if file.is_file())
    wanted = (file.relative_to(checkout) for file in files if "__pycache__" not in file.parts)
    names = [str(file) for file in wanted if file.suffix not in NOT_CODE]
    points = {(point.group, point.name) for point in metadata.distribution("slipstream-rl").entry_points}
    assert points == {("console_scripts", "slipstream"), ("vllm.general_plugins", "slipstream")}, points
    return [name for name in names if not (site / name).is_file()]


def said(*words: object, code: int = 0) -> str:
    """All that a command prints; AssertionError for another exit code, or a traceback."""
    done = subprocess.run([COMMAND, *map(str, words)], capture_output=True, text=True, timeout=LIMIT_S)
    text = done.stdout + done.stderr
    assert done.returncode == code and "Traceback" not in text, f"{words}: exit code {done.returncode}\n{text}"
    return text


def check_commands(checkout: Path) -> int:
    """The light commands run with a broker that the wheel brings; the others name what they lack."""
    Path("model").mkdir()
    qwen = checkout / "configs" / "models" / "Qwen3-0.6B" / "config.json"
    row = '{"question": "1+1", "answer": "2"}\n'
    files = {"config.json": qwen.read_text(), "tokenizer.json": "{}", "model.safetensors": "\2" + 7 * "\0" + "{}"}
    for name, text in {"../job.yaml": JOB, "../data.jsonl": row, **files}.items():
        Path("model", name).write_text(text)
    assert metadata.version("slipstream-rl") in said("--version")
    assert json.loads(said("plan", "job.yaml", "--json"))["plan"]["parameters"] == 596_049_920
    found = json.loads(said("doctor", "--json", "--role", "base"))
    assert {one["level"] for one in found if one["check"] in ("python", "packages")} == {"fine"}, found
    learner = json.loads(said("doctor", "--json", "--role", "learner", code=1))
    assert ["slipstream-rl[learner]" in one["fix"] for one in learner if one["check"] == "packages"] == [True], learner
    said("keys", "keys", "--node", "one")
    with subprocess.Popen([COMMAND, "broker", "job.yaml"], stderr=subprocess.PIPE, text=True) as broker:
        assert broker.stderr is not None and "listens on" in (line := broker.stderr.readline()), line
        assert json.loads(said("status", "run", "--json"))
        said("stop", "run")
        assert broker.wait(LIMIT_S) == 0
    said("ledger", "run")
    lacking = {
        "learner": [
            *("learner job.yaml", "sft job.yaml", "convert model made", "certify job.yaml", "replay run"),
            "up job.yaml",
        ],
        "rollout": ["rollout job.yaml", "scorer job.yaml judge", "eval job.yaml"],
        "cpu": ["init first"],
        **{
            "report": ["report run"],
            "web": ["web run"],
            "redis": ["broker job.yaml broker.store=redis broker.redis=redis://127.0.0.1:9/0"],
        },
    }
    for extra, lines in lacking.items():
        for line in lines:
            text = said(*line.split(), code=2)
            assert f"slipstream-rl[{extra}]" in text, text
    print(f"light commands run; {sum(map(len, lacking.values()))} others name the extra that they need")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
