"""torchrun as the roles use it, with the torch that is installed and with older ones."""

import argparse

import pytest
from torch.distributed.elastic.multiprocessing.api import PContext

from learner import torchrun

WORDS = ["--nproc-per-node", "2", torchrun.GRACE, "300", "-m", "learner.main"]


@pytest.mark.parametrize("known", [True, False], ids=["2.13", "2.11"])
def test_busy_ranks_get_their_time_from_a_torch_without_the_option_too(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    parser = argparse.ArgumentParser()
    if known:
        parser.add_argument(torchrun.GRACE)
    monkeypatch.setattr(torchrun, "get_args_parser", lambda: parser)
    monkeypatch.setattr(PContext.close, "__defaults__", (None, 30))
    found = torchrun.with_grace(WORDS)
    assert found == (WORDS if known else ["--nproc-per-node", "2", "-m", "learner.main"])
    assert PContext.close.__defaults__ == (None, 30 if known else 300)


def test_words_without_the_option_stay_as_they_are() -> None:
    assert torchrun.with_grace(WORDS[:2]) == WORDS[:2]
