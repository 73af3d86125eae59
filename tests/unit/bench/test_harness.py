"""A script of bench as a process: what it writes."""

import json
import subprocess
import sys
from pathlib import Path

from tests.rigs.processes import OURS, ROOT

SCRIPT = """
import harness

@harness.script(output=str, rounds=1, words=())
def main(options):
    return {"rounds": options.rounds, "said": options.words}
"""


def test_a_script_writes_its_figures_beside_where_they_come_from(tmp_path: Path) -> None:
    script, output = tmp_path / "some.py", tmp_path / "some.json"
    script.write_text(SCRIPT)
    environment = {"PATH": "/usr/bin:/bin", **OURS, "PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}"}
    words = [sys.executable, script, "a", "b", "--output", output, "--rounds", "2"]
    subprocess.run(words, env=environment, capture_output=True, cwd=ROOT, check=True)
    result = json.loads(output.read_text())
    assert (result["rounds"], result["said"]) == (2, ["a", "b"])
    assert result["arguments"] == {"output": str(output), "rounds": 2, "words": ["a", "b"]}
    assert result["commit"] and result["machine"]["python"]
