"""The number game of the quickstart: its numbers, demonstrated games, and a random model of 0.3 M parameters."""

from pathlib import Path

from launch.quickstart.assets import build

build(Path("assets"), seed=1, preset_name="tiny")
