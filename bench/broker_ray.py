"""CPU that a Ray actor queue takes for a group, beside raw ZeroMQ with the same groups.

    RAY_AUTH_MODE=disabled python bench/broker_ray.py [--size 1k 8k] [--rounds 3]

verl's way: an asyncio actor has a deque; the producer pickles a group of arrays and calls `put`, the consumer calls
`get` and unpickles. Microseconds of CPU per group over every process that Ray started for it, between the first group
and the last. Needs `pip install ray`, which is no dependency of this project: use an environment of its own, with
numpy, msgspec, psutil and pyzmq.
"""

import os
import pickle
from typing import Any

import broker_groups
import harness
import ray
from broker_ways import Load, RawZeroMQ, Way, compared

GROUPS = {"1k": 1600, "8k": 320}
WARM_UP = 160
AT_ONCE = 8  # puts under way
QUEUED = 64
STORE_BYTES = 1 << 30


class Queue:
    """The actor in the middle; verl's drops the oldest when it is full, this one lets the producer wait."""

    def __init__(self) -> None:
        import asyncio
        from collections import deque

        self._items: deque[bytes] = deque()
        self._changed = asyncio.Condition()

    async def put(self, item: bytes) -> None:
        async with self._changed:
            while len(self._items) >= QUEUED:
                await self._changed.wait()
            self._items.append(item)
            self._changed.notify_all()

    async def get(self) -> bytes:
        async with self._changed:
            while not self._items:
                await self._changed.wait()
            item = self._items.popleft()
            self._changed.notify_all()
            return item


class Peer:
    """The producer and the consumer: actors of their own, so processes of their own."""

    def ready(self) -> None: ...

    def produce(self, queue: Any, size: str, groups: int) -> None:
        episodes = [broker_groups.make_episodes(seed, size) for seed in range(broker_groups.DISTINCT_GROUPS)]
        under_way: list[Any] = []
        for index in range(groups):
            samples = [episode._asdict() for episode in episodes[index % len(episodes)]]
            data = pickle.dumps({"serial": index, "samples": samples}, protocol=pickle.HIGHEST_PROTOCOL)
            under_way.append(queue.put.remote(data))
            if len(under_way) >= AT_ONCE:
                _, under_way = ray.wait(under_way, num_returns=1)
        ray.get(under_way)

    def consume(self, queue: Any, groups: int) -> int:
        tokens = 0
        for _ in range(groups):
            group = pickle.loads(ray.get(queue.get.remote()))  # noqa: S301 - the measured way; this script's own data
            tokens += sum(len(sample["tokens"]) for sample in group["samples"])
        return tokens


class RayQueue(Way):
    name = "ray"

    def measure(self, load: Load) -> dict[str, float]:
        """One round, with a queue and peers of its own."""
        queue = ray.remote(Queue).options(max_concurrency=200).remote()
        producer, consumer = (ray.remote(Peer).remote() for _ in range(2))
        ray.get([producer.ready.remote(), consumer.ready.remote()])
        pass_on(queue, producer, consumer, load._replace(groups=WARM_UP))
        before_s = harness.children_cpu_s()
        _, wall_s = harness.timed(lambda: pass_on(queue, producer, consumer, load))
        used_s = harness.children_cpu_s() - before_s
        for actor in (queue, producer, consumer):
            ray.kill(actor)
        return {"cpu_us_per_group": 1e6 * used_s / load.groups, "groups_per_s": load.groups / wall_s}


def pass_on(queue: Any, producer: Any, consumer: Any, load: Load) -> None:
    done = [consumer.consume.remote(queue, load.groups), producer.produce.remote(queue, *load)]
    tokens = ray.get(done)[0]
    assert tokens >= load.groups * broker_groups.SAMPLES * broker_groups.COMPLETION_TOKENS[load.size]


@harness.script(size=list(GROUPS), rounds=3)
def main(options: harness.Options) -> harness.Figures:
    here = os.pathsep.join([os.path.dirname(os.path.abspath(__file__)), os.environ.get("PYTHONPATH", "")])
    environment = {"env_vars": {"PYTHONPATH": here, "OMP_NUM_THREADS": "1"}}
    ray.init(
        address="local", num_cpus=4, object_store_memory=STORE_BYTES, include_dashboard=False,
        log_to_driver=False, runtime_env=environment,
    )  # fmt: skip
    sizes: dict[str, object] = {}
    for size in options.size:
        sizes[size] = compared([RawZeroMQ(), RayQueue()], options.rounds, Load(size, GROUPS[size]))["ways"]["ray"]
    ray.shutdown()
    return {"rounds": options.rounds, "sizes": sizes}
