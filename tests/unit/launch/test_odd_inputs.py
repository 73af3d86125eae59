"""Files that no program of ours wrote end in a finding or a message, not in a traceback."""

import json
import os
import struct
from pathlib import Path

import pytest

from common.errors import EXIT_FAILED
from common.process.lifecycle import alive
from launch.cli import main
from launch.doctor import config_files
from launch.observe.advisor import advice_for
from launch.plan.architecture import UnknownArchitecture, read_architecture


@pytest.mark.parametrize(
    "header",
    [{"a": 1}, {"a": {}}, {"a": {"data_offsets": ["x", "y"]}}, {"a": {"data_offsets": [1]}}, [1], "x"],
)
def test_a_header_that_describes_no_tensors_is_said(tmp_path: Path, header: object) -> None:
    data = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(data)) + data)
    assert "its header does not describe tensors" in config_files.broken_weights(file)


@pytest.mark.parametrize("index", ["[]", "5", '{"weight_map": {"a": 1, "b": "x"}}', '{"weight_map": {"a": []}}', "{}"])
def test_an_index_that_names_no_files_is_said(tmp_path: Path, index: str) -> None:
    (tmp_path / config_files.INDEX).write_text(index)
    missing, reason = config_files.missing_shards(tmp_path)
    assert not missing and "cannot be read" in reason


def test_metrics_of_another_program_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "time_s": 1.0}\n')
    assert main(["report", str(tmp_path)]) == EXIT_FAILED
    assert "metrics.jsonl is not that of an RL job" in capsys.readouterr().err


@pytest.mark.parametrize("pid", [1 << 31, 1 << 63, 1 << 80])
def test_a_number_that_no_process_can_have_is_of_no_living_one(pid: int) -> None:
    assert not alive(pid)
    assert alive(os.getpid())


@pytest.mark.parametrize("name", ["num_attention_heads", "num_key_value_heads", "decoder_sparse_step"])
def test_a_model_of_zero_heads_is_no_model(name: str) -> None:
    document: dict[str, object] = {
        "model_type": "qwen3_moe", "num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2,
        "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 64, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    }  # fmt: skip
    read_architecture(document)
    with pytest.raises(UnknownArchitecture, match=f"{name} is 0"):
        read_architecture({**document, name: 0})


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"nodes_live": 2},
        {"nodes_live": "x", "step_s": 1.0, "learner_idle_s": 0.5},
        {"nodes_live": [1], "step_s": 1.0, "learner_idle_s": 0.5},
        {"nodes_live": 2, "step_s": None, "learner_idle_s": None},
        {"nodes_live": 2, "step_s": 1.0, "learner_idle_s": 0.5, "concurrency": None},
    ],
)
def test_status_gives_no_advice_on_metrics_that_it_cannot_read(line: dict[str, object]) -> None:
    assert advice_for([line] * 10, 1) is None


@pytest.mark.parametrize("running", [0, 8])
def test_advice_on_a_learner_that_only_waits_divides_by_nothing(running: int) -> None:
    line = {"nodes_live": 2, "step_s": 1.0, "learner_idle_s": 1.0, "concurrency": 8, "episodes_running": running}
    found = advice_for([line] * 10, 1)
    assert found is not None and found.change == ("larger_window" if running == 0 else "more_nodes")
