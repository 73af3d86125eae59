"""A wake-up of another thread's poll."""

import zmq

from common.process.wake import Wake


def test_a_wake_up_never_blocks_and_is_one_however_often_it_was_sent() -> None:
    wake, poller = Wake(), zmq.Poller()
    poller.register(wake.fileno(), zmq.POLLIN)
    for _ in range(100_000):  # a socket pair would be full
        wake.send()
    assert poller.poll(0)
    wake.drain()
    wake.drain()
    assert not poller.poll(0)
