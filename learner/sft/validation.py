"""The loss of a warm start's held-out rows under the current weights."""

import msgspec

from learner.backend_protocol import Backend
from learner.batch.packing import Document, build, plan

AT_ONCE = 32  # microbatches whose log-probabilities are in memory together


class Validation:
    """Held-out documents, packed once; every rank has its part of them."""

    def __init__(self, backend: Backend, documents: list[Document], micro_batch_tokens: int) -> None:
        """Raises UsageError, naming the row, when one is longer than `micro_batch_tokens`."""
        ranks, multiple = backend.data_parallel_size, backend.document_multiple
        plans = plan(documents, ranks, micro_batch_tokens, multiple, backend.hidden_size)
        self._backend, self._packed = backend, build(documents, plans[backend.data_parallel_rank])

    def loss(self) -> float:
        """Mean cross-entropy over the trained tokens, in nats; the same on every rank. No gradient. Collective."""
        total, tokens = 0.0, 0
        for at in range(0, len(self._packed), AT_ONCE):
            part = self._packed[at : at + AT_ONCE]
            for batch, logprobs in zip(part, self._backend.logprobs(part), strict=True):
                trained = batch.loss_mask > 0
                total -= logprobs.double()[trained].sum().item()
                tokens += int(trained.sum())
        mine = msgspec.msgpack.encode((self._backend.data_parallel_rank, total, tokens))
        gathered = [msgspec.msgpack.decode(each) for each in self._backend.all_gather_bytes(mine)]
        shares = {rank: share for rank, *share in gathered}  # the ranks of one replica have the same
        return sum(shares[rank][0] for rank in sorted(shares)) / max(sum(count for _, count in shares.values()), 1)
