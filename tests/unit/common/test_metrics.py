"""Metric declarations, the one-line-per-step file, and its reader."""

import errno
import json
import math
import os
from pathlib import Path

import msgspec
import pytest
from msgspec import UNSET

from common.errors import UsageError
from common.metrics import DERIVED, PANELS, EvaluationMetrics, SftMetrics, StepMetrics, declarations
from common.process.run_dir import MetricsWriter
from common.run_reader import EVALUATIONS, READ_BYTES, RECENT, MetricsTail, RecentTail, mean, metrics_decoder, read_tail
from tests.rigs.brokers import full_disk
from tests.rigs.telemetry import read_line
from tests.rigs.waiting import read_jsonl

# other programs rely on these
REQUIRED = """
step policy_version time_s reward_mean reward_std loss grad_norm entropy ratio_mean ratio_max
correction_clip_fraction mismatch_abs_mean staleness_mean staleness_max tokens_expired tokens_trained groups
learner_idle_s step_s publish_s publish_bytes generation_stall_s tokens_generated_total tokens_trained_total
tokens_wasted_total groups_ready groups_leased nodes_live
"""


def line(step: int, loss: float = 0.5) -> SftMetrics:
    return SftMetrics(
        step=step, time_s=1.0, loss=loss, grad_norm=1.0, lr=0.1, tokens_trained=3, sequence_tokens=4, step_s=0.2
    )


@pytest.mark.parametrize("kind", [StepMetrics, EvaluationMetrics, SftMetrics])
def test_every_metric_says_unit_reduction_and_meaning(kind: type[msgspec.Struct]) -> None:
    found = declarations(kind)
    assert [d.name for d in found] == list(kind.__struct_fields__)
    for declaration in found:
        assert declaration.description
        assert declaration.reduction in ("mean", "sum", "max", "last")
    assert kind is not StepMetrics or set(REQUIRED.split()) <= {d.name for d in found}


def test_every_curve_is_a_metric() -> None:
    names = {name for panel in PANELS for name in (*panel.lines, panel.band, panel.compared) if name}
    assert names - set(DERIVED) <= {*StepMetrics.__struct_fields__, *SftMetrics.__struct_fields__}
    assert all(panel.compared in ("", *panel.lines) for panel in PANELS)


def test_lines_come_back_as_written_and_resuming_removes_a_torn_one_and_those_that_are_trained_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for step in range(3):
        writer.write(line(step))
        assert len(read_tail(path, SftMetrics).lines) == step + 1  # visible at once
    writer.sync()
    with full_disk(tmp_path, path.stat().st_size + 10), pytest.raises(OSError) as failed:
        writer.write(line(3))
    assert failed.value.errno == errno.ENOSPC
    writer.write(line(4))
    writer.close()
    assert [row["step"] for row in read_jsonl(path)] == [0, 1, 2, 4]
    again = MetricsWriter(path, keep_before_step=2)
    again.write(line(2, loss=0.1))
    again.close()
    assert read_tail(path, SftMetrics).lines == [line(0), line(1), line(2, loss=0.1)]


def test_evaluations_are_lines_of_their_own_kind_and_those_of_the_checkpoints_version_stay(tmp_path: Path) -> None:
    def evaluated(version: int) -> EvaluationMetrics:
        return EvaluationMetrics(
            step=version, policy_version=version, time_s=1.0, dataset="d", problems=1, samples=1, temperature=0.0,
            failed=0, mean_reward=0.3, mean_reward_low=None, mean_reward_high=None, pass_at={"1": 0.0},
            pass_at_low={"1": 0.0}, pass_at_high={"1": 0.5}, truncated_fraction=0.0, length_mean=3.0, tokens=3,
            seconds=1.0,
        )  # fmt: skip

    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for written in (evaluated(0), line(0), line(1), evaluated(2), line(2), evaluated(3)):
        writer.write(written)
    writer.close()
    assert read_jsonl(path)[0]["kind"] == "evaluation"
    assert read_tail(path, SftMetrics).lines == [line(0), line(1), line(2)]
    MetricsWriter(path, keep_before_step=2).close()
    assert read_tail(path, SftMetrics).lines == [line(0), line(1)]
    assert read_tail(path, StepMetrics).evaluations == [evaluated(0), evaluated(2)]


def test_a_torn_last_line_is_left_out_and_a_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_tail(path, SftMetrics).lines == []
    path.write_bytes(msgspec.json.encode(line(0)) + b'\n{"step": 1')
    assert read_tail(path, SftMetrics).lines == [line(0)]
    MetricsWriter(path).close()
    assert read_tail(path, SftMetrics).lines == [], "a new run starts an empty file"
    for use in (MetricsWriter, lambda path: read_tail(path, SftMetrics).lines):
        with pytest.raises(UsageError) as refused:
            use(tmp_path)
        assert str(tmp_path) in str(refused.value) and os.strerror(errno.EISDIR) in str(refused.value)


# ---------------------------------------------------------------- lines of other releases, and files that grow


def test_what_a_line_lacks_is_unset_or_no_number_and_null_is_nan() -> None:
    found = read_line(3, reward_mean=math.nan, kl_mean=math.nan, groups="x", environment={"a": math.nan, "b": 1})
    assert math.isnan(found.reward_mean) and math.isnan(found.loss)
    assert isinstance(found.kl_mean, float) and found.environment["b"] == 1.0 and math.isnan(found.environment["a"])
    assert (found.groups, found.samples, found.lr, found.tokens_by_age) == (0, UNSET, UNSET, [])
    odd = read_line(3, time_s="late", loss=10**400, tokens_by_age=[1, 2.5], mismatch_by_age=[0.5, None])
    assert math.isnan(odd.time_s) and math.isnan(odd.loss) and odd.tokens_by_age == []
    assert odd.mismatch_by_age[0] == 0.5 and math.isnan(odd.mismatch_by_age[1])
    evaluation = read_line(3, EvaluationMetrics, mean_reward_low=None)
    assert (evaluation.mean_reward_low, evaluation.dataset, evaluation.pass_at) == (None, "", {})


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"step": -1}', b'{"step": "x"}', b'{"step": 0, "kind": "x"}'])
def test_what_is_no_step_is_passed_over(data: bytes) -> None:
    assert metrics_decoder(StepMetrics)(data) is None


def test_a_tail_reads_only_whole_lines_and_starts_over_with_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path, SftMetrics)

    def series() -> list[float]:
        tail.update()
        return tail.series(lambda line: line.loss)

    assert series() == [] and tail.last is None and tail.mean(lambda line: line.loss) is mean([]) is None
    path.write_text('{"step": 0, "loss": 1}\n{"step": 1, "loss": null}\n{"step": 2, "loss"')
    assert series() == [1.0], "NaN is no value"
    with path.open("a") as file:
        file.write(": 2}\n")
    assert series() == series() == [1.0, 2.0]
    (tmp_path / "new").write_text('{"step": 0, "loss": 5}\n')
    (tmp_path / "new").replace(path)
    assert series() == [5.0]


def test_the_tail_of_a_long_run_keeps_its_newest_lines_and_the_sums_of_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    step = '{"step": %d, "reward_mean": %d, "tokens_expired": 2, "samples_failed_by_reason": {"timeout": 1}}\n'
    path.write_text("".join(step % (i, i) for i in range(500)) + '{"step": 500}\n')
    tail = RecentTail(path)
    tail.update()
    with path.open("a") as file:
        file.writelines(json.dumps({"step": i, "kind": "evaluation"}) + "\n" for i in range(EVALUATIONS + 5))
    tail.update()
    assert [line.step for line in tail.lines] == list(range(501 - RECENT, 501))
    assert (len(tail.evaluations), tail.evaluations[-1].step) == (EVALUATIONS, EVALUATIONS + 4)
    assert (tail.steps, tail.expired, tail.failed) == (501, 1000, {"timeout": 500})
    assert list(tail.rewards) == list(range(500))
    (tmp_path / "new").write_text(step % (0, 7))
    (tmp_path / "new").replace(path)
    tail.update()
    assert (tail.steps, tail.expired, tail.failed, list(tail.rewards)) == (1, 2, {"timeout": 1}, [7.0])
    assert (len(tail.lines), tail.evaluations) == (1, [])


def test_a_part_of_the_file_without_a_line_and_nesting_without_end_hide_no_later_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 3}\n')
    tail = read_tail(path, StepMetrics)
    with path.open("ab") as file:
        file.write(b"\0" * (READ_BYTES + 9) + b"\n" + b'{"a":' * 9999 + b"1" + b"}" * 9999 + b'\n{"step": 4}\n')
    tail.update()
    assert [line.step for line in tail.lines] == [line.step for line in read_tail(path, StepMetrics).lines] == [3, 4]
