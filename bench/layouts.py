"""Which parallel layouts are proven: python bench/layouts.py.

Runs TEST and writes what its last test found to bench/results/layouts.json.
"""

import json

import harness

TEST = "tests/integration/megatron/test_megatron_parity.py"


def main() -> None:
    options = harness.parser(__doc__).parse_args()
    rows = harness.scratch() / "layouts.json"
    harness.python("-m", "pytest", "-q", TEST, SLIPSTREAM_LAYOUTS=str(rows))
    harness.save("layouts", options, {"rounds": 1, "rows": json.loads(rows.read_text())})


if __name__ == "__main__":
    main()
