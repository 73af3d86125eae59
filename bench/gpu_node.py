"""A node on one GPU against bare vLLM, and the cost of a flip there: python bench/gpu_node.py --output FILE.

A random model of Qwen3-0.6B's shape (with a head of its own) in bfloat16, 256 samples at once. A sample ends by chance,
after 512 tokens at the latest. The sides run one at a time; the others are stopped meanwhile (SIGSTOP):

- bare: vLLM's own engine without our plugins (bench/node_throughput.py). It is the floor of a node.
- node, by CUDA graphs or eager, and by asynchronous or plain scheduling: a whole node on a real broker (bench/talk.py),
  in windows without a new version and in windows in which one version follows the other.

Figures per flip are the pause that the node measures, the seconds between two versions, and the tokens that are
missing against the windows without. Tokens count when a sample ends, so the last one needs several windows. The floor
of a pause is a bare copy of as many bytes from pinned memory to the device.

The windows take 6 minutes with all kinds, and 3.5 with two.
`--kinds "graphs async fp8"` has nodes that round their weights.
`--short` is a smaller model for a few seconds; without a GPU it runs on the CPU, eager and with plain scheduling.
`--graphs full` leaves vLLM's own choice, which compiles; `decode` captures decoding only and compiles nothing.
"""

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import harness
import psutil
import talk
from node_throughput import Served, bare
from random_qwen3 import Model
from talk import Serving, Shape

from launch.checks.selftest import ends_of_logs
from launch.up.devices import interpreter

QWEN3_0_6B = Model("0.6B", 28, 151936).keys() | {"initializer_range": 0.02}
SAMPLES = Shape(turns=1, answer=512, cut=1.0, prompt=128, observation=0, requests=256)
SHORT = Shape(turns=1, answer=32, cut=1.0, prompt=16, observation=0, requests=32)
CAPTURED = [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256]  # samples of a batch with a CUDA graph
DECODE = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": CAPTURED}
KINDS = ["graphs async", "eager async", "graphs plain", "eager plain"]
BATCHED = 8192  # tokens of a step, on both sides; the default of a node on an H100
STEP = 2  # groups that this process takes at once
COPIES = 5
LIBRARIES = """
import json, torch
from importlib.util import find_spec
from pathlib import Path
folder, said = Path(find_spec("vllm").origin).with_name("vllm_flash_attn"), {}
for version in "32":
    try:
        torch.ops.load_library([*folder.glob(f"_vllm_fa{version}_C*.so")][0])
        found = "loads"
    except IndexError:
        found = "is not installed"
    except OSError as error:
        found = f"does not load: {error}"
    said[f"FlashAttention {version}"] = found
print(json.dumps(said))
"""


class Node(talk.NodeJob):
    """A node whose learner takes groups and publishes nothing by itself."""

    version = 0  # published last

    def work(self) -> None:
        self._offer()
        if self._client.take(self._taken, self._step, talk.TAKE_S):
            self._taken += 1

    def report(self) -> Any:
        (node,) = self._client.status().nodes
        return node.report

    def publish_when_idle(self) -> None:
        """Publish the next version if the node has the last one."""
        if self.report().policy_version == self.version and self._taken > self.version:
            self.version = self._taken
            self._publish()

    def settle(self) -> None:
        while self.report().policy_version != self.version:
            time.sleep(talk.TAKE_S / 10)


class Flipping:
    """The same node while one version follows the other."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.seen: list[Any] = []  # the node's report at each look at the tokens: a window's begin and end

    @property
    def processes(self) -> list[psutil.Process]:
        return self._node.processes

    def tokens(self) -> int:
        self.seen.append(self._node.report())
        return self._node.tokens()

    def work(self) -> None:
        self._node.publish_when_idle()
        self._node.work()

    def settle(self) -> None:
        self._node.settle()

    def close(self) -> None: ...


def attention_libraries() -> dict[str, str]:
    """Which of vLLM's attention libraries load in the nodes' environment. Without any, engines use slower kernels."""
    found: dict[str, str] = json.loads(harness.command(interpreter("rollout")[1], "-c", LIBRARIES))
    print("attention:", ", ".join(f"{name} {state}" for name, state in found.items()), flush=True)
    return found


def serving(kind: str, options: harness.Options, cuda: bool) -> Serving:
    """How the engines of `kind` compute: one of KINDS, and `fp8` where nodes round their weights."""
    graphs, scheduling, *rounded = kind.split()
    extra: dict[str, Any] = {"async_scheduling": scheduling == "async"}
    if options.attention:
        extra["attention_backend"] = options.attention
    if graphs == "graphs" and options.graphs == "decode":
        extra["compilation_config"] = DECODE
    cache_mib = 256 if options.short else 9216
    quantization = "fp8_per_channel" if rounded else None
    return Serving("bfloat16" if cuda else "float32", cache_mib, BATCHED, graphs == "eager", quantization, extra)


def started(kind: str, folder: Path, shape: Shape, options: harness.Options, cuda: bool) -> talk.Side:
    """A side that has sampled as many tokens as its first samples have."""
    engine = serving("graphs async" if kind == "bare" and cuda else kind.replace("bare", "eager plain"), options, cuda)
    if kind == "bare":
        side: talk.Side = Served(bare, folder / "model", shape, engine)
    else:
        own = own_folder(folder, kind)
        weights = {"bucket_mib": options.bucket_mib}
        side = Node(own, folder / "model", shape, step=STEP, weights=weights, serving=engine, staleness=1 << 20)
    while side.tokens() < shape.requests * shape.answer // 2:
        side.work()
    side.settle()
    talk.stop(side.processes)
    return side


def own_folder(folder: Path, kind: str) -> Path:
    return folder / kind.replace(" ", "-")


def copy_ms(size_bytes: int) -> float | None:
    """Milliseconds of a copy from pinned memory to the device; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    took = []
    for _ in range(COPIES + 1):
        torch.cuda.synchronize()
        _, seconds = harness.timed(lambda: (device.copy_(host), torch.cuda.synchronize()))
        took.append(1000 * seconds)
    return round(statistics.median(took[1:]), 2)


def window(side: talk.Side, seconds: float) -> dict[str, float]:
    """Tokens per second; of a node under flips their number, the pause and the seconds from version to version, too."""
    try:
        (found,) = talk.in_windows({"": side}, 1, seconds)[""]
    finally:
        talk.stop(side.processes)
    if isinstance(side, Flipping):
        before, after = side.seen[-2:]
        flips = after.flips - before.flips
        stall_s = after.generation_stall_s - before.generation_stall_s
        found |= {"flips": flips, "pause_ms": round(1000 * stall_s / max(1, flips), 2)}
        found |= {"version_s": round(found["wall_s"] / max(1, flips), 3)}
    return found


def row(name: str, figures: harness.Figures) -> dict[str, Any]:
    """The figures of one side over all its windows; `name` is one of KINDS or bare."""
    still = talk.totals([w for key, w in figures.items() if key.startswith(f"{name}, window") and "error" not in w])
    made = {"side": name, "tokens_per_s": still["tokens_per_s"]}
    flips = [w for key, w in figures.items() if key.startswith(f"{name}, flips") and w.get("flips")]
    if flips:
        total = talk.totals(flips)
        count, wall_s = sum(w["flips"] for w in flips), sum(w["wall_s"] for w in flips)
        made |= {
            "tokens_per_s_with_flips": total["tokens_per_s"],
            "flips": count,
            "pause_ms": round(sum(w["pause_ms"] * w["flips"] for w in flips) / count, 2),
            "version_s": round(wall_s / count, 3),
        }
        if min(len(still["rounds"]), len(flips)) > 1:
            lost = (still["tokens_per_s"] - total["tokens_per_s"]) * wall_s / count
            made["tokens_lost_per_flip"] = round(lost)
    return made


@contextmanager
def sides(options: harness.Options, figures: harness.Figures, cuda: bool) -> Iterator[dict[str, talk.Side]]:
    """All sides, warm and stopped. One that does not come up is an error in the figures.

    The first one starts alone: it fills vLLM's caches, which the others would fill at the same time.
    """
    shape, kinds = (SHORT if options.short else SAMPLES), options.kinds if cuda else ["eager plain"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        folder, found = Path(made), dict[str, talk.Side]()
        harness.part(options, figures, "model", partial(_build, folder / "model", shape, options.short, cuda))
        for together in (["bare"], kinds):
            end = time.monotonic() + options.start_s
            starts = {kind: begun(partial(started, kind, folder, shape, options, cuda)) for kind in together}
            for kind, start in starts.items():
                come = partial(_come, start, end, own_folder(folder, kind))
                if harness.part(options, figures, f"start of {kind}", come) is not None:
                    found[kind] = start.result()
            _kill_others(found)  # those that did not come up
        try:
            yield found
        finally:
            for side in found.values():
                talk.go_on(side.processes)
            _kill_others({})


def _build(folder: Path, shape: Shape, short: bool, cuda: bool) -> dict[str, Any]:
    import torch

    model_shape = {"initializer_range": 0.02} if short else QWEN3_0_6B
    with torch.device("cuda" if cuda else "cpu"):
        talk.build(folder, shape.answer, "bfloat16" if cuda else "float32", **model_shape)
    if cuda:
        torch.cuda.empty_cache()
    size_bytes = (folder / "model.safetensors").stat().st_size
    return {"bytes": size_bytes, "copy_ms": copy_ms(size_bytes)}


def begun(work: Callable[[], Any]) -> Future[Any]:
    """The result of `work()` to come; a thread that hangs does not keep this process."""
    future = Future[Any]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _come(start: Future[Any], end: float, folder: Path) -> dict[str, float]:
    """Wait until a side is ready; raises RuntimeError with the ends of its logs after monotonic `end`."""
    began = time.monotonic()
    try:
        start.result(max(1.0, end - time.monotonic()))
    except TimeoutError:
        raise RuntimeError(f"not ready in time{ends_of_logs(folder)}") from None
    return {"waited_s": round(time.monotonic() - began, 1)}


def _kill_others(found: dict[str, talk.Side]) -> None:
    """End all children that are of none of these sides."""
    wanted = {process.pid for side in found.values() for process in side.processes}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.pid not in wanted and "resource_tracker" not in " ".join(process.cmdline()):
                process.kill()


@harness.script(
    output=str, short={"action": "store_true"}, windows=4, seconds=10.0, start_s=200.0, kinds=KINDS, graphs="decode",
    attention="", bucket_mib=64,
)  # fmt: skip
def main(options: harness.Options) -> harness.Figures:
    import torch

    cuda = torch.cuda.is_available()
    if options.short:
        options.windows, options.seconds, options.kinds = 1, min(options.seconds, 2.0), options.kinds[:2]
    figures: harness.Figures = {"rounds": options.windows}
    if cuda:
        harness.part(options, figures, "attention_libraries", attention_libraries)
    with sides(options, figures, cuda) as found:
        views = {f"{name}, flips": Flipping(side) for name, side in found.items() if isinstance(side, Node)}
        for number in range(options.windows):
            for name, side in {**found, **views}.items():
                work = partial(window, side, options.seconds)
                harness.part(options, figures, f"{name}, window {number}", work)
        figures["rows"] = [row(name, figures) for name in found]
        harness.keep(options, figures)
        for one in figures["rows"]:
            print(", ".join(f"{key} {value}" for key, value in one.items()))
    return figures
