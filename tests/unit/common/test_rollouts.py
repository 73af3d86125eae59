"""Groups on the wire: bytes that do not change, fields that later releases added, and what is refused."""

import itertools

import msgspec
import numpy as np
import pytest

from common.rollouts import Branch, Group, Sample, TemperatureRun, VersionRun, decode_group, encode_group
from common.wire_types import DTYPES, Array

# A group as the release before `routed_experts` sent it.
WITHOUT_ROUTING = (
    b"\x83\xa6serial\x03\xa7samples\x91\x8a\xa6tokens\x82\xa5dtype\xa5int32\xa4data\xc4\x0c\x05\x00\x00\x00\x06\x00\x00\x00"
    b"\x07\x00\x00\x00\xa9loss_mask\x82\xa5dtype\xa5uint8\xa4data\xc4\x03\x00\x01\x01\xb1behavior_logprobs\x82\xa5dtype"
    b"\xa7float32\xa4data\xc4\x0c\x00\x00\x00\x00\x00\x00\x80\xbf\x00\x00\x80\xbf\xacversion_runs\x91\x82\xa5start\x01\xa7version"
    b"\x09\xa6reward\xcb?\xe0\x00\x00\x00\x00\x00\x00\xabstop_reason\xa4stop\xa5turns\x01\xacturn_rewards\x90\xa5error\xc0"
    b"\xa7metrics\x80\xaeschema_version\x01"
)
ROUTING = b"\xaerouted_experts\x82\xa5dtype\xa5int16\xa4data\xc4\x0c\x01\x00\x02\x00\x03\x00\x00\x01\xff\xff\xff\xff"
SPANS = b"\xaaturn_spans\x91\x92\x01\x03"
BRANCHES = b"\xa8branches\x90\xa4name\xa0\xb0temperature_runs\x90"
NOTES = b"\xa5notes\x81\xa5judge\xa3bad"
TEACHER = b"\xb0teacher_logprobs\x82\xa5dtype\xa7float32\xa4data\xc4\x0c" + np.array([0, -0.5, -1], "<f4").tobytes()
TEACHER += b"\xafteacher_top_ids\xc0\xb4teacher_top_logprobs\xc0\xa9teacher_s\xcb\x3f\xe0" + bytes(6)


def sample(**changes: object) -> Sample:
    made = Sample(
        tokens=Array.of([5, 6, 7], "int32"),
        loss_mask=Array.of([0, 1, 1], "uint8"),
        behavior_logprobs=Array.of([0.0, -1.0, -1.0], "float32"),
        version_runs=[VersionRun(1, 9)],
        reward=0.5,
        stop_reason="stop",
    )
    return msgspec.structs.replace(made, **changes)


def routed(*experts: int) -> Array:
    return Array.of(list(experts), "int16")


def test_golden_bytes_of_a_group_with_routing_turns_notes_and_a_teacher_do_not_change() -> None:
    given = {"routed_experts": routed(1, 2, 3, 256, -1, -1), "turn_spans": [(1, 3)], "notes": {"judge": "bad"}}
    given |= {"teacher_logprobs": Array.of([0.0, -0.5, -1.0], "float32"), "teacher_s": 0.5}
    data = encode_group(Group(3, [sample(**given)]))
    golden = WITHOUT_ROUTING.replace(b"\x91\x8a", b"\x91\xde\x00\x14", 1).replace(
        b"\xa7metrics\x80", b"\xa7metrics\x80" + ROUTING + SPANS + NOTES + TEACHER + BRANCHES, 1
    )
    assert data == golden.replace(b"\x83", b"\x84", 1) + b"\xa6source\xa0"
    assert decode_group(WITHOUT_ROUTING) == Group(3, [sample()]), "as the release before sent it"


def test_branches_come_back_as_they_were_sent_and_are_checked_as_samples_are() -> None:
    def branch(mask: list[int], starts: list[int]) -> Branch:
        runs = [VersionRun(start, 4) for start in starts]
        arrays = Array.of([5, 6, 8, 9], "int32"), Array.of(mask, "uint8"), Array.of([0, 0, 0, -1.5], "float32")
        return Branch(*arrays, runs, [(1, 2), (3, 4)], name="searcher")

    group = Group(3, [sample(branches=[branch([0, 0, 0, 1], [1])])])
    assert decode_group(encode_group(group)) == group
    assert (group.samples[0].sampled, group.samples[0].sampled_all) == (2, 3)
    assert [path.token_versions().tolist() for path in group.samples[0].paths] == [[9, 9, 9], [4, 4, 4, 4]]
    for wrong, fact in ((branch([0, 0, 1], [1]), "loss_mask"), (branch([0, 0, 0, 1], []), "policy version")):
        with pytest.raises(ValueError, match=f"sample 0: branch 1: .*{fact}"):
            decode_group(encode_group(Group(3, [sample(branches=[wrong])])))


@pytest.mark.parametrize("runs", [[(3, 1.0)], [(-1, 1.0)], [(1, 1.0), (1, 2.0)], [(1, 0.0)], [(0, float("nan"))]])
def test_temperatures_that_do_not_fit_are_refused(runs: list[tuple[int, float]]) -> None:
    kept = sample(temperature_runs=[TemperatureRun(1, 0.5), TemperatureRun(2, 1.5)])
    assert decode_group(encode_group(Group(3, [kept]))).samples == [kept]
    with pytest.raises((ValueError, msgspec.ValidationError)):
        decode_group(encode_group(Group(3, [sample(temperature_runs=[TemperatureRun(*run) for run in runs])])))


def test_routing_comes_back_as_it_was_sent_unless_it_does_not_divide_by_the_tokens() -> None:
    group = decode_group(encode_group(Group(3, [sample(routed_experts=routed(0, 7, 300, 2, -1, -1))])))
    experts = group.samples[0].routed_experts
    assert experts is not None
    assert experts.numpy().reshape(3, 1, 2).tolist() == [[[0, 7]], [[300, 2]], [[-1, -1]]]
    assert experts.numpy().dtype == np.int16
    with pytest.raises(ValueError, match="4 routed experts"):
        decode_group(encode_group(Group(3, [sample(routed_experts=routed(0, 1, 2, 3))])))


def test_entries_are_counted_as_numpy_counts_them_and_what_it_refuses_is_not_counted() -> None:
    for dtype, n in itertools.product(DTYPES, (0, 1, 7)):
        array = Array.of(np.arange(n), dtype)
        assert array.entries() == len(array.numpy()) == n
    for array in (Array("int32", b"12345"), Array("float64", b"12345678")):
        for look in (array.numpy, array.entries):
            with pytest.raises(ValueError, match=array.dtype):
                look()


def sample_of(mask: Array, starts: list[int]) -> Sample:
    n = mask.entries()
    runs = [VersionRun(start, 1) for start in starts]
    return Sample(Array.of([5] * n, "int32"), mask, Array.of([0.0] * n, "float32"), runs, 0.0, "stop")


@pytest.mark.parametrize("dtype", ["uint8", "int16"])
@pytest.mark.parametrize(
    ("mask", "starts", "wrong"),
    [
        ([0, 1, 1], [1, 1], "not increasing"),
        ([0, 1, 1], [2, 1], "not increasing"),
        ([0, 1, 1], [-1], "not increasing"),
        ([0, 1, 1], [1, 3], "not increasing"),
        ([0, 1, 1], [2], "without a policy version"),
        ([0, 1, 1], [], "without a policy version"),
        ([2, 0, 0], [1], "without a policy version"),
    ],
)
def test_versions_that_do_not_fit_the_tokens_are_refused(
    dtype: str, mask: list[int], starts: list[int], wrong: str
) -> None:
    data = encode_group(Group(0, [sample_of(Array.of(mask, dtype), starts)]))
    with pytest.raises(ValueError, match=f"group 0 sample 0: .*{wrong}"):
        decode_group(data)


@pytest.mark.parametrize(("mask", "starts"), [([0, 1, 1], [1]), ([0, 1, 1], [0, 2]), ([0, 0, 0], []), ([0, 0, 1], [2])])
def test_versions_that_cover_what_was_sampled_are_accepted(mask: list[int], starts: list[int]) -> None:
    group = Group(0, [sample_of(Array.of(mask, "uint8"), starts)])
    assert decode_group(encode_group(group)) == group
