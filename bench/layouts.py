"""Which parallel layouts are proven: python bench/layouts.py.

Runs TEST and writes what its last test found to bench/results/layouts.json.
"""

import json

import harness

TEST = "tests/integration/megatron/test_megatron_parity.py"


@harness.script()
def main(options: harness.Options) -> harness.Figures:
    rows = harness.scratch() / "layouts.json"
    harness.python("-m", "pytest", "-q", TEST, SLIPSTREAM_LAYOUTS=str(rows))
    return {"rounds": 1, "rows": json.loads(rows.read_text())}
