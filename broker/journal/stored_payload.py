"""What a payload is that lies elsewhere than in memory."""

from abc import ABC, abstractmethod


class KeptPayload(ABC):
    """A group's encoded common.rollouts.Group in a store, fetched only when somebody wants it."""

    __slots__ = ()

    @abstractmethod
    def read(self) -> bytes:
        """The payload. Raises BrokerError when it cannot be had."""
