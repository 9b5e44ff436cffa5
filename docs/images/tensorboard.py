"""Make docs/images/tensorboard.png: the curves of examples/digits.py in TensorBoard.

    python docs/images/tensorboard.py

Needs chromium on the PATH, and the packages of ``pip install -e . --group tests``. Trains for some seconds.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
PICTURE = Path(__file__).with_suffix(".png")
SIZE = (1420, 770)
VIEW = "?darkMode=false#scalars&_smoothingWeight=0&tagFilter=train%7Csec"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_for(url: str, secs: float = 60) -> None:
    deadline = time.monotonic() + secs
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "examples" / "digits.py"), "--logdir", "runs/digits"]
        subprocess.run(command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=300)
        port = free_port()
        address = f"http://127.0.0.1:{port}/"
        options = ["--logdir", "runs", "--host", "127.0.0.1", "--port", str(port)]
        with subprocess.Popen([sys.executable, "-m", "tensorboard.main", *options], cwd=folder) as server:
            try:
                wait_for(f"{address}data/runs")
                time.sleep(5)  # until TensorBoard has read the event file
                screenshot = f"{folder}/screenshot.png"
                window = ",".join(map(str, SIZE))
                browser = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
                options = [
                    f"--user-data-dir={folder}/profile",
                    f"--window-size={window}",
                    "--virtual-time-budget=20000",
                ]
                options += ["--virtual-time-budget=20000", f"--screenshot={screenshot}", address + VIEW]
                subprocess.run([*browser, *options], check=True, timeout=120)
            finally:
                server.terminate()
        with Image.open(screenshot) as image:
            image.convert("RGB").quantize(64).save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
