"""A published folder is complete; one that was interrupted is not there."""

from pathlib import Path

from learner.megatron import durable


def test_a_folder_appears_only_when_published(tmp_path: Path) -> None:
    target = tmp_path / "step-3"
    staging = durable.prepare(target)
    (staging / "weights").write_bytes(b"new")
    assert not target.exists()
    durable.publish(target)
    assert (target / "weights").read_bytes() == b"new"
    assert not staging.exists()


def test_what_an_interrupted_write_left_is_discarded(tmp_path: Path) -> None:
    target = tmp_path / "step-3"
    (durable.prepare(target) / "half").write_bytes(b"written")
    (durable.prepare(target) / "whole").write_bytes(b"written")
    durable.publish(target)
    assert [file.name for file in target.iterdir()] == ["whole"]


def test_publishing_again_replaces_the_folder(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for content in (b"old", b"new"):
        (durable.prepare(target) / "weights").write_bytes(content)
        durable.publish(target)
    assert (target / "weights").read_bytes() == b"new"
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
