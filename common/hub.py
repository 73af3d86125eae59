"""Names of the Hugging Face hub in a config, and local copies of the files that they name.

A model is OWNER/NAME[@REVISION], unless a folder has that name. The files of a dataset are
hf://datasets/OWNER/NAME[@REVISION]/FILES; the last part of FILES may be a pattern. A whole copy in the cache (HF_HOME)
is used without asking the hub. So a restart needs no network, and a branch that moves on the hub changes no run. A
download is huggingface_hub's: it locks every file, and a file gets its name when it is complete. So is an upload.
"""

import importlib
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import MOST_SHOWN, SlipstreamError, UsageError

SCHEME = "hf://"
MODEL_KEYS = ("model.path", "learner.loss.reference", "learner.critic.path")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
MODEL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.safetensors")  # no code and no pickle; weights come last
LEFT_OUT = ["*/*", "consolidated*"]  # second copies of the weights

_REPO = r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[^@/]+))?"
_MODEL = re.compile(rf"({SCHEME})?{_REPO}(?P<files>)")
_DATASET = re.compile(rf"{SCHEME}datasets/{_REPO}/(?P<files>[^*]*[^/]*\.(jsonl|parquet))")
_SHARD = re.compile(r"(.*)-\d+-of-(\d+)(\..*)")
_CAUSES = {  # by the name of the error
    "GatedRepoError": "accept its terms on its page, and set HF_TOKEN to a token of that account",
    "ModuleNotFoundError": "huggingface_hub is not installed here; pip install huggingface_hub",
    "RepositoryNotFoundError": "the hub has no such repository, or it is private and HF_TOKEN does not open it",
    "RevisionNotFoundError": "the repository has no such revision",
}


def absolute(key: str, value: str) -> str:
    """An absolute path, or 'hf://...' for a name of the hub. An existing path wins over a name of the hub.

    Raises UsageError when 'hf://...' is no name of a model or of a dataset's files, and when no file can have the path.
    Also for a variable such as $HOME, which only a shell replaces.
    """
    if value.startswith("$"):
        hint = "no variable is replaced here; './$NAME' is a folder with that name"
        raise UsageError(f"{key}: expected a path, found {value[:MOST_SHOWN]!r}: {hint}")
    if value.startswith(SCHEME):
        _parse(key, value)
        return value
    try:
        path = Path(value).expanduser()
        with suppress(PermissionError):  # another role may be allowed to look there
            if not path.exists() and key in MODEL_KEYS and _MODEL.fullmatch(value):
                return SCHEME + value
        return str(path.resolve())
    except (OSError, RuntimeError, ValueError) as error:  # too long; a loop or an unknown user; a null byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{key}: expected a path, found {value[:MOST_SHOWN]!r}: {reason}") from None


def local_copy(key: str, value: str, only_config: bool = False) -> str:
    """`value`, or for a name of the hub the local path of its files, which are downloaded unless a whole copy exists.

    `only_config`: config.json is all that is needed of a model. Raises UsageError with the cause and what to do.
    """
    if not value.startswith(SCHEME):
        return value
    name = _parse(key, value)
    wanted = [name["files"]] if name["files"] else ["config.json"] if only_config else [*MODEL_FILES]
    try:
        folder = _snapshot(name, wanted)
        if not _is_whole(folder, wanted):
            raise FileNotFoundError(_lacks(folder, name))
        return str(folder / name["files"])
    except Exception as error:  # huggingface_hub raises whatever its HTTP library raises
        no_folder = f"no folder {value.removeprefix(SCHEME)} exists here, and " if key in MODEL_KEYS else ""
        raise UsageError(f"{key}: {no_folder}{value} cannot be used: {_cause(error, name)}") from None


def open_upload(key: str, name: str) -> None:
    """Make the model repository OWNER/NAME, private, unless it exists: a wrong token is found before long work.

    Raises UsageError with the cause and what to do.
    """
    found = _MODEL.fullmatch(name)
    if found is None or found["revision"] or name.startswith(SCHEME):
        raise UsageError(f"{key}: expected OWNER/NAME, found {name}")
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        hub.create_repo(name, private=True, exist_ok=True)
    except Exception as error:  # huggingface_hub raises whatever its HTTP library raises
        raise UsageError(f"{key}: {name} cannot be used: {_cause_of_upload(error)}") from None


def upload(name: str, folder: Path, message: str) -> str:
    """Put all files of `folder` into a repository of `open_upload`; returns its address. Raises SlipstreamError."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        return str(hub.upload_folder(repo_id=name, folder_path=str(folder), commit_message=message).repo_url)
    except Exception as error:
        again = f"`hf upload {name} {folder}` tries again"
        raise SlipstreamError(f"{folder} is not on the hub: {_cause_of_upload(error)}; {again}") from None


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer in a model's folder; raises UsageError naming model.path."""
    transformers: Any = importlib.import_module("transformers")  # takes seconds
    try:
        if not Path(folder).is_dir():
            raise FileNotFoundError("it is not a folder")
        return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises whatever its parsers raise
        reason = str(error).strip().split("\n")[0]
        raise UsageError(f"model.path: {folder} has no usable tokenizer: {reason}") from error


def begin_tokens(tokenizer: Any) -> list[int]:
    """The tokens that a tokenizer puts before a text, such as <s>; [] for most. A chat template writes its own."""
    text, whole = (list[int](tokenizer.encode("a", add_special_tokens=added)) for added in (False, True))
    found = (at for at in range(len(whole)) if whole[at : at + len(text)] == text)
    return whole[: next(found, 0)]


def begun(tokens: list[int], begin: list[int]) -> list[int]:
    """`tokens` behind those of `begin_tokens`, unless they begin so already."""
    return tokens if tokens[: len(begin)] == begin else [*begin, *tokens]


def _parse(key: str, value: str) -> re.Match[str]:
    """The groups `repo`, `revision` (None stands for the main branch) and `files` ('' for a model)."""
    model = key in MODEL_KEYS
    if found := (_MODEL if model else _DATASET).fullmatch(value):
        return found
    form = "hf://OWNER/NAME[@REVISION]" if model else "hf://datasets/OWNER/NAME[@REVISION]/FILES.jsonl or .parquet"
    raise UsageError(f"{key}: expected {form}, found {value}")


def _snapshot(name: re.Match[str], wanted: list[str]) -> Path:
    """The folder of a revision in the cache, with the files that match `wanted`."""
    hub: Any = importlib.import_module("huggingface_hub")
    what: dict[str, Any] = {"repo_type": "dataset"} if name["files"] else {"ignore_patterns": LEFT_OUT}
    what |= {"repo_id": name["repo"], "revision": name["revision"]}
    with suppress(FileNotFoundError):
        folder = Path(hub.snapshot_download(**what, allow_patterns=wanted, local_files_only=True))
        if _is_whole(folder, wanted, sure=True):
            return folder
    if wanted[:-1]:  # the weights need the commit of the rest: a branch may move
        what["revision"] = Path(hub.snapshot_download(**what, allow_patterns=wanted[:-1])).name
    return Path(hub.snapshot_download(**what, allow_patterns=wanted[-1]))


def _is_whole(folder: Path, wanted: list[str], sure: bool = False) -> bool:
    """Whether nothing is missing; `sure`: a pattern's files whose names do not say how many there are do not count."""
    files = [str(file) for file in folder.glob(wanted[-1]) if file.is_file()]
    shards = Counter(match.groups() for file in files if (match := _SHARD.fullmatch(file)))
    whole = bool(files) and all(count == int(total) for (_, total, _), count in shards.items())
    if len(wanted) > 1:
        tokenizer = any((folder / file).is_file() for file in TOKENIZER_FILES)
        return whole and tokenizer and (folder / "config.json").is_file()
    return whole and not (sure and "*" in wanted[0] and shards.total() < len(files))


def _cause(error: Exception, name: re.Match[str]) -> str:
    if type(error).__name__ in _CAUSES:
        return _CAUSES[type(error).__name__]
    constants = importlib.import_module("huggingface_hub.constants")
    if constants.HF_HUB_OFFLINE:
        get = f"hf download {name['repo']}{' --repo-type dataset' * bool(name['files'])}"
        return f"HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} lacks files of it; run `{get}` with a network"
    return f"{_reason(error)} (HF_ENDPOINT is {constants.ENDPOINT}; with HF_HUB_OFFLINE=1 a copy in HF_HOME is enough)"


def _cause_of_upload(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return _CAUSES["ModuleNotFoundError"]
    if getattr(getattr(error, "response", None), "status_code", 0) in (401, 403):
        return "the hub does not let you write there; set HF_TOKEN to a token that may"
    constants = importlib.import_module("huggingface_hub.constants")
    offline = "; HF_HUB_OFFLINE is set" * bool(constants.HF_HUB_OFFLINE)
    return f"{_reason(error)} (HF_ENDPOINT is {constants.ENDPOINT}{offline})"


def _reason(error: Exception) -> str:
    return str(error.__cause__ or error).strip().partition("\n")[0]


def _lacks(folder: Path, name: re.Match[str]) -> str:
    if not name["files"]:
        return f"{folder} lacks config.json, a tokenizer, or some of the safetensors files"
    hub: Any = importlib.import_module("huggingface_hub")
    there = hub.list_repo_files(name["repo"], repo_type="dataset", revision=name["revision"])
    return f"it has {[file for file in there if file.endswith(('.jsonl', '.parquet'))][:6]} and no {name['files']}"
