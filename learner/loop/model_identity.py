"""Which models a run began from, and whether a continued run has them still."""

import hashlib
import logging
from pathlib import Path

import msgspec

from common.config.schema import BaseConfig
from common.errors import UsageError
from common.hub import SCHEME, TOKENIZER_FILES
from learner.megatron.conversion.hf_folder import weights_digest

logger = logging.getLogger(__name__)

# Files of a model that a job reads, besides its weights.
COMPANIONS = (
    "config.json", "generation_config.json", *TOKENIZER_FILES, "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
WEIGHTS = "weights"
COMMIT, STAMPS = "commit", "stamps"  # the hub's, and as `stamps`: neither is compared with a checkpoint's


def stamps(folder: Path) -> str:
    """Identifies names, sizes and times of a folder's safetensors files; '' without any. Raises OSError."""
    told = [
        (file.name, stat.st_size, stat.st_mtime_ns) for file in folder.glob("*.safetensors") if (stat := file.stat())
    ]
    return hashlib.sha256(msgspec.json.encode(sorted(told))).hexdigest()[:16] if told else ""


def identities(
    named: BaseConfig, local: BaseConfig, known: dict[str, dict[str, str]] | None = None
) -> dict[str, dict[str, str]]:
    """By config key, digests of the models that a continued run reads again, whatever folder they are in.

    `named` has the hub's names, `local` the paths of their copies. `known`: what this returned before; weights whose
    files have the same `stamps` are not read again. Raises UsageError when a file cannot be read.
    """
    found: dict[str, dict[str, str]] = {}
    both = {"model.path": (named.model.path, local.model.path)}
    both["learner.loss.reference"] = (named.learner.reference or "", local.learner.reference or "")
    for key, (name, path) in both.items():
        if not path:
            continue
        folder = Path(path)
        files = [file for each in COMPANIONS for file in folder.glob(each)] if key == "model.path" else []
        try:
            digests = {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest()[:16] for f in files}
            before = (known or {}).get(key, {})
            if stamp := stamps(folder):
                digests[STAMPS] = stamp
            if stamp and before.get(STAMPS) == stamp:
                digests[WEIGHTS] = before[WEIGHTS]
            else:
                if stamp:  # minutes for many tensors on a slow file system
                    logger.info("%s: reading parts of every tensor in %s, to know this model again", key, folder)
                digests[WEIGHTS] = weights_digest(folder)[:16]
        except (OSError, ValueError) as error:
            raise UsageError(f"{key}: {folder} cannot be read: {error}") from None
        if name.startswith(SCHEME) and folder.parent.name == "snapshots":
            digests[COMMIT] = folder.name
        found[key] = digests
    return found


def check_same_models(
    config: BaseConfig, before: dict[str, dict[str, str]], now: dict[str, dict[str, str]], checkpoint: str
) -> None:
    """Raise UsageError when a folder has another model `now` than when `checkpoint` was written; as `identities`."""
    for key in now.keys() & before.keys():
        former, found = before[key], now[key]
        both = former.keys() & found.keys() | {"config.json", WEIGHTS}
        differing = [n for n in sorted(both - {COMMIT, STAMPS}) if former.get(n) != found.get(n)]
        if not differing:
            continue
        name = config.model.path if key == "model.path" else config.learner.reference or ""
        told = "; ".join(
            f"{n} had digest {former.get(n, 'none')} and now has {found.get(n, 'none')}" for n in differing
        )
        hint = "restore it, or choose another run.dir for a run from this model"
        if COMMIT in both and former[COMMIT] != found[COMMIT] and "@" not in name:
            hint = f"set {key}={name.removeprefix(SCHEME)}@{former[COMMIT]} to continue with that commit"
        raise UsageError(f"{key}: {name} is not the model that it was when {checkpoint} was written: {told}; {hint}")


def warn_of_files(before: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> None:
    """Warn of a model's files that only the checkpoint or only the folder has: not every copy has all of them."""
    for key in now.keys() & before.keys():
        former, found = (each[key].keys() - {COMMIT, STAMPS} for each in (before, now))
        told = [f"{name} is no longer there" for name in sorted(former - found)]
        told += [f"{name} is new" for name in sorted(found - former)]
        if told:
            hint = "a chat template or a tokenizer's file that comes or goes changes the prompts"
            logger.warning("%s: files of the model since the last checkpoint: %s; %s", key, ", ".join(told), hint)
