"""The age of the KV cache behind every sampled token, against a count of single entries."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from common.arrays import Array
from common.rollouts import Sample, VersionRun
from learner.batch.kv_age import cache_ages


def episode(turns: list[tuple[int, list[int]]]) -> Sample:
    """Per turn: tokens of prompt or environment text, then the version that sampled each token."""
    mask: list[int] = []
    runs: list[VersionRun] = []
    for text, versions in turns:
        mask += [0] * text
        for version in versions:
            if not runs or runs[-1].version != version:
                runs.append(VersionRun(len(mask), version))
            mask.append(1)
    zeros = Array.of([0] * len(mask), "int32")
    return Sample(zeros, Array.of(mask, "uint8"), Array.of([0.0] * len(mask), "float32"), runs, 0.0, "stop")


def counted(turns: list[tuple[int, list[int]]]) -> tuple[list[float], list[int]]:
    """The same, one entry at a time, as an engine that salts its prefix cache by version fills its cache."""
    mean: list[float] = []
    largest: list[int] = []
    for text, versions in turns:
        mean += [0.0] * text
        largest += [0] * text
        cache: list[int] = []
        for version in versions:
            cache += [version] * (len(mean) - len(cache))  # what is not there yet is computed before it is read
            ages = [version - entry for entry in cache] or [0]
            mean.append(sum(ages) / len(ages))
            largest.append(max(ages))
    return mean, largest


steps = st.lists(st.integers(0, 3), min_size=1, max_size=12)


@given(turns=st.lists(st.tuples(st.integers(1, 5), steps), min_size=1, max_size=4), first=st.integers(0, 9))
def test_ages_are_those_of_an_entry_by_entry_count(turns: list[tuple[int, list[int]]], first: int) -> None:
    at, rising = first, []
    for text, jumps in turns:  # versions only rise
        versions = [at := at + (jump if jump > 1 else 0) for jump in jumps]
        rising.append((text, versions))
    mean, largest = cache_ages(episode(rising))
    expected = counted(rising)
    np.testing.assert_allclose(mean, expected[0], atol=1e-9)
    assert largest.tolist() == expected[1]


def test_one_version_has_a_fresh_cache() -> None:
    mean, largest = cache_ages(episode([(3, [4, 4, 4]), (2, [4])]))
    assert not mean.any() and not largest.any()


def test_a_call_that_begins_after_the_flip_has_a_fresh_cache_and_one_in_flight_an_old_one() -> None:
    mean, largest = cache_ages(episode([(2, [5, 7, 7]), (3, [7, 7])]))
    # The token after the flip is sampled over two entries of version 5 and one that is computed with it.
    assert largest.tolist() == [0, 0, 0, 2, 2, 0, 0, 0, 0, 0]
    np.testing.assert_allclose(mean[3:5], [2 * 2 / 3, 2 * 2 / 4])
    assert not mean[5:].any()


def test_a_sample_without_prompt_or_without_tokens_has_no_age() -> None:
    assert cache_ages(episode([(0, [1, 2])]))[0].tolist() == [0.0, 0.0]
    assert len(cache_ages(episode([]))[0]) == 0


def test_a_learner_that_starts_again_at_a_lower_version_gives_no_negative_age() -> None:
    mean, largest = cache_ages(episode([(2, [9, 3, 3])]))
    assert not mean.any() and not largest.any()
