"""The picture of the live page in the README: python -m bench.page_picture RUN [docs/img/web.png].

It starts `slipstream web` for the run and draws the overview with a headless Chromium. Run it in a checkout.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.chromium import browser

WIDTH, HEIGHT = 1280, 780


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="the folder of a run")
    parser.add_argument("picture", nargs="?", type=Path, default=Path("docs/img/web.png"))
    args = parser.parse_args()
    command = [sys.executable, "-m", "launch.cli", "web", args.run, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        with tempfile.TemporaryDirectory() as folder, browser(Path(folder)) as page:
            page.size(WIDTH, HEIGHT)
            page.open(address)
            page.until("document.querySelectorAll('path.line').length >= 9 && document.querySelector('dd') !== null")
            page.picture(args.picture)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
