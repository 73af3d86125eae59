"""Whether a job's numbers are certified: `plan` and `doctor` show it, and the first line of a job says it.

A certificate lies in the folder `certificates` beside the config, under the config's name, or in the run folder. It
lapses when the code, a version or something that it covers differs. No torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from common.config.certificate import OF_CRITIC, Certificate, covered
from common.config.checks import MODEL_HINT
from common.config.schema import BaseConfig
from common.errors import ConfigError, Problem, UsageError
from common.hub import local_copy
from common.process.run_dir import RunDir, differences, unwritable, write_json
from common.process.versions import learner_digest, versions

KEY = "model.uncertified"
FOLDER = "certificates"
IN_RUN = "certificate.json"
VERSIONS = ("slipstream", "torch", "megatron-core", "megatron-bridge", "transformers")
MAKE = "`slipstream certify` makes one; docs/certificates.md"


def shape_folder(config: BaseConfig, file: str) -> tuple[Path, str]:
    """The folder with the model's config.json, and why it is not that of model.path ('' if it is).

    The repository has the config.json of the hub's models that its configs name, in `models` beside `file`. Raises
    UsageError where there is none at all.
    """
    name = config.model.path
    try:  # only config.json is needed of the model, also where it is in the hub
        return Path(local_copy("model.path", name, only_config=True)), ""
    except UsageError as error:
        path = Path(file).parent / "models" / name.rpartition("/")[2].partition("@")[0]
        if not (path / "config.json").is_file():
            raise
        return path, str(error)


def read_model(folder: Path) -> dict[str, object]:
    """config.json of a model folder; raises UsageError when there is nothing to plan from."""
    path = folder / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except FileNotFoundError:
        needs = f"a plan needs at least the model's config.json; {MODEL_HINT}"
        raise UsageError(f"model.path: {path} does not exist; {needs}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"model.path: {path} cannot be read: {error}") from None


@dataclass(frozen=True)
class Standing:
    """Whether a job has a certificate, and whether it counts."""

    file: Path  # the certificate, or its place
    certificate: Certificate | None = None
    why: str = ""  # it has none, or the reason why it lapsed; '' when it stands

    @property
    def sentence(self) -> str:
        if self.certificate is None or self.why:
            return f"uncertified: {self.why}"
        made = self.certificate
        return f"certified: {len(made.checks)} checks on {made.ranks} CPU ranks, {made.made} ({self.file})"

    def keep(self, run: RunDir) -> None:
        """Put a certificate that stands into the run folder, in the place of another one. Raises as `unwritable`.

        A run that has begun keeps the one that it has: it says what was proven of the steps until now.
        """
        target = run.path / IN_RUN
        if target.absolute() == self.file.absolute():  # the folder is where it was found
            return
        try:
            if self.certificate is not None and not self.why:
                write_json(target, self.certificate)
            elif not run.began:
                target.unlink(missing_ok=True)
        except OSError as error:
            raise unwritable("run.dir", run.path, error) from error


def place(file: str | Path) -> Path:
    """Where the certificate of a config file is written."""
    return Path(file).parent / FOLDER / f"{Path(file).stem}.json"


def standing(config: BaseConfig, file: str | Path, model: Path | None = None) -> Standing:
    """Whether the certificate of the config that was read from `file` counts for it, with its overrides.

    `model`: the folder with the model's config.json, where that is known.
    """
    path = next((p for p in (place(file), Path(file).parent / IN_RUN) if p.is_file()), place(file))
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Certificate)
    except FileNotFoundError:
        return Standing(path, why=f"{path} does not exist; {MAKE}")
    except (OSError, ValueError) as error:
        return Standing(path, why=f"{path} cannot be read: {error}; {MAKE}")
    try:
        folder = shape_folder(config, str(file))[0] if model is None else model
        return Standing(path, found, lapse(found, config, read_model(folder)))
    except UsageError as error:
        return Standing(path, found, str(error))


def lapse(found: Certificate, config: BaseConfig, document: dict[str, object]) -> str:
    """Why a certificate says nothing of a config and its model's config.json; '' when it does."""
    here = versions()
    for name in VERSIONS:  # CPU and CUDA builds of one version have one source; what is not here is unknown
        then, now = (x.partition("+")[0] for x in (found.versions.get(name, ""), here[name]))
        if now and then != now:
            return f"{name} was {then or 'absent'} and now is {now}; {MAKE}"
    if found.source != learner_digest():
        return f"the learner's code is not that of commit {(found.commit or 'unknown')[:10]} any more; {MAKE}"
    for key, then, now in differences(found.covers, covered(config, document)):
        return f"{key} was {_shown(then)} and now is {_shown(now)}; {MAKE}"
    if "critic" in found.covers and not any(check.name.startswith(OF_CRITIC) for check in found.checks):
        return f"it has no check of the critic; {MAKE}"
    return ""


def _shown(value: object) -> str:
    return "its default" if value is None else repr(value)


def first_line(config: BaseConfig, file: str) -> tuple[str, Standing]:
    """The first line of a job, and its standing; raises ConfigError where model.uncertified refuses it."""
    found = standing(config, file)
    for problem in refused(config, found):
        raise ConfigError.of(file, problem)
    return found.sentence, found


def refused(config: BaseConfig, found: Standing) -> Iterator[Problem]:
    """Why a launch refuses a job of this standing."""
    if found.why and config.model.uncertified == "refuse":
        yield Problem(KEY, "a job with a certificate", "none that counts", found.why)
