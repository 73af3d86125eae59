"""Which parallel layouts are proven: python bench/layouts.py [RESULTS]

Runs tests/integration/test_megatron_parity.py, whose last test writes what it proved to bench/results/layouts.json, and
puts these rows into docs/layouts.md. With RESULTS, the rows of that file go into the page and nothing is run.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "layouts.md"
BEGIN, END = "<!-- table of proven layouts: bench/layouts.py writes it -->", "<!-- end of the table -->"


def table(rows: list[dict[str, str]]) -> str:
    """Rows as a Markdown table."""
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([row[column] for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rows_of(page: str) -> list[dict[str, str]]:
    """The reverse of `table`, of a whole page."""
    lines = page.split(BEGIN)[1].split(END)[0].strip().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], line, strict=True)) for line in cells[2:]]


def main() -> int:
    results = ROOT / "bench" / "results" / "layouts.json"
    if len(sys.argv) > 1:
        results = Path(sys.argv[1])
    else:
        environment = os.environ | {"SLIPSTREAM_LAYOUTS": str(results)}
        test = "tests/integration/test_megatron_parity.py"
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", test], cwd=ROOT, env=environment, check=False)
        if done.returncode:
            return done.returncode
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(json.loads(results.read_text()))}\n\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
