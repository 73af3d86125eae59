"""A whole job from a converted model: the learner alone reads its weights, nodes get theirs from the learner."""

from pathlib import Path

from common.config.converted import WEIGHTS
from tests.rigs.jobs import assert_trained_exactly_once, slipstream, write_config
from tests.rigs.processes import SLIPSTREAM, Process

STEPS = 4


def test_learner_and_node_train_from_a_converted_folder(tmp_path: Path, assets: Path) -> None:
    folder = tmp_path / "converted"
    slipstream("convert", str(assets / "model"), str(folder))
    run = tmp_path / "run"
    reference = {"reference": str(folder), "kl_coefficient": 0.01}
    config = write_config(tmp_path / "job.yaml", assets, run, STEPS, model={"path": str(folder)})
    words = [f"learner.loss={reference}".replace("'", ""), "learner.checkpoint.every=2"]
    with Process(tmp_path / "up.log", [*SLIPSTREAM, "up", str(config), *words, "--plain"]) as job:
        assert job.wait() == 0, job.output()
    assert_trained_exactly_once(run, STEPS)
    assert (run / "model" / "model.safetensors").is_file() and not (run / "model" / WEIGHTS).exists()
