"""How this copy of Slipstream was installed, and what has to be installed for a role or a command."""

from pathlib import Path

from common.errors import UsageError
from common.process.versions import INSTALL_BRIDGE, versions

SOURCES = Path(__file__).resolve().parents[2]
# the source tree, whose launch/setup.sh builds environments; None where pip has installed a wheel
CHECKOUT = SOURCES if (SOURCES / "launch" / "setup.sh").is_file() else None
NEEDED = {"learner": ("torch", "megatron-core", "megatron-bridge"), "rollout": ("torch", "vllm")}  # names of versions()
# environments of launch/setup.sh that have the packages of an extra; the first is the usual one
ENVIRONMENTS = {
    **{"learner": ("learner", "cpu"), "sinks": ("adapters",)},
    **dict.fromkeys(("rollout", "web"), ("rollout", "cpu")),
    **dict.fromkeys(("cpu", "report"), ("cpu",)),
}


def environments_folder() -> Path:
    """Where `.venv-learner` and `.venv-rollout` are looked for: in the checkout, or else in the working directory."""
    return CHECKOUT or Path.cwd()


def advice(extra: str, checkout: Path | None = CHECKOUT) -> str:
    """A clause that says how the packages of an extra get here."""
    if checkout is not None:
        return f"run launch/setup.sh {' or '.join(ENVIRONMENTS[extra])}"
    command = f"pip install 'slipstream-rl[{extra}]'"
    if extra not in NEEDED and extra != "cpu":
        return f"run {command}"
    bridge = f" and {INSTALL_BRIDGE}" if extra == "learner" else ""
    cpu = "" if extra == "cpu" else "; slipstream-rl[cpu] is for machines without a GPU"
    return f"run {command}{bridge}{cpu}. docs/install.md says what pip cannot bring"


def need_packages(*roles: str) -> None:
    """Raise UsageError for a package without which a role does not start."""
    here = versions()
    for role in roles:
        if lacking := [name for name in NEEDED[role] if not here[name]]:
            raise UsageError(f"the role {role} needs {', '.join(lacking)}, not installed here; {advice(role)}")
