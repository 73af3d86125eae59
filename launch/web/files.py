"""Which folders the page shows, and which files in them it may read."""

from pathlib import Path

from common.config.checks import resolve_paths
from common.config.loading import load_either
from common.errors import UsageError
from common.process.run_dir import RunDir


def run_of(word: str) -> RunDir:
    """RUN as a folder that may not exist yet, or the run.dir of a config file; raises UsageError for anything else."""
    path = Path(word)
    if "://" in word:
        raise UsageError(f"{word}: the page reads the files of a run; give the run's folder, not an address")
    if path.is_file():
        return RunDir.of(resolve_paths(load_either(path)))
    if path.suffix in (".yaml", ".yml"):
        raise UsageError(f"{word}: there is no such config file")
    return RunDir(path)


def inside(run: RunDir, path: Path) -> bool:
    """Whether a file of the run is one: a link may lead out of the folder, and such a file is never read."""
    try:
        return path.resolve().is_relative_to(run.path.resolve())
    except (OSError, RuntimeError):  # a link to itself
        return False


def outside(run: RunDir) -> list[str]:
    """The files and folders of the page that lead out of the run."""
    asked = (run.config, run.metrics, run.events, run.status_json, run.broker_json, run.ledger_json)
    folders = (run.trace, run.transcripts)
    found = [*asked, *folders, *(path for folder in folders if inside(run, folder) for path in folder.glob("*.jsonl"))]
    return [path.name for path in found if not inside(run, path)]
