"""Modules of bench find each other in their own folder, as when one of them is run as a script."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))
