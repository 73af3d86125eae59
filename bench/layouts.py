"""Which parallel layouts are proven: python bench/layouts.py.

Runs tests/integration/test_megatron_parity.py, whose last test writes bench/results/layouts.json.
"""

import harness

if __name__ == "__main__":
    results = str(harness.RESULTS / "layouts.json")
    harness.python("-m", "pytest", "-q", "tests/integration/test_megatron_parity.py", SLIPSTREAM_LAYOUTS=results)
