"""A node without an engine: hands in groups that follow from (seed, serial) alone, as a recording would.

usage: recorded_node.py BROKER_ADDRESS VOCAB GROUP_SIZE GROUPS_PER_STEP [KEYS GATE]

GATE is a file with the number of groups that may be handed in; without it there is no limit.
Ends when the broker says that the learner is done, or with the parent that started it.
"""

import asyncio
import os
import sys
from pathlib import Path

import numpy as np

from broker.client.connect import Access, connect_node
from broker.contract import NodeReport
from common.process.lifecycle import die_with_parent
from common.rollouts import Group, GroupMeta, Sample, VersionRun, encode_group
from common.wire_types import Array

NEWEST = 1 << 20  # claims weights newer than any, so that admission lets it lease whatever is offered


def recorded_group(serial: int, vocab: int, group_size: int, version: int) -> Group:
    """Random tokens, log-probabilities and rewards that depend on the arguments only."""
    draw = np.random.Generator(np.random.PCG64(np.random.SeedSequence([7, serial])))
    samples: list[Sample] = []
    for _ in range(group_size):
        prompt, answer = int(draw.integers(3, 9)), int(draw.integers(4, 30))
        mask = np.r_[np.zeros(prompt), np.ones(answer)].astype(np.uint8)
        samples.append(
            Sample(
                tokens=Array.of(draw.integers(0, vocab, prompt + answer), "int32"),
                loss_mask=Array.of(mask, "uint8"),
                behavior_logprobs=Array.of(mask * draw.uniform(-5.5, -4.0, prompt + answer), "float32"),
                version_runs=[VersionRun(prompt, version)],
                reward=float(draw.integers(0, 2)),
                stop_reason="stop",
            )
        )
    return Group(serial, samples)


async def serve(
    address: str, vocab: int, group_size: int, groups_per_step: int, keys: str | None, gate: Path | None
) -> None:
    report = NodeReport("recorded", os.getpid(), "here", "generating", NEWEST)
    async with connect_node(Access(address=address, role="node", credentials=keys, name="recorded")) as client:
        await client.register(report)
        handed_in = 0
        while True:
            closed = gate is not None and handed_in >= int(gate.read_text())
            for lease in [] if closed else await client.lease("recorded", NEWEST, 4, 0.5):
                serial = lease.task.serial
                version = max(0, serial // groups_per_step - 1)
                group = recorded_group(serial, vocab, group_size, version)
                rewards = [sample.reward for sample in group.samples]
                tokens = sum(int(sample.loss_mask.numpy().sum()) for sample in group.samples)
                meta = GroupMeta(version, version, float(np.mean(rewards)), tokens)
                await client.complete("recorded", lease.token, meta, encode_group(group))
                handed_in += 1
            if (await client.heartbeat(report, [])).drain:
                await client.leave("recorded")
                return
            await asyncio.sleep(0.05 if closed else 0.0)


if __name__ == "__main__":
    die_with_parent()
    keys, gate = sys.argv[5:7] if len(sys.argv) > 5 else (None, None)
    asyncio.run(serve(sys.argv[1], *(int(word) for word in sys.argv[2:5]), keys, Path(gate) if gate else None))
