"""A real S3 server, of moto, in a process of its own."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

DEADLINE_SECS = 60.0
_numbers = itertools.count()


class S3Server:
    """A server on a free port of this machine, which can be stopped and started again with nothing in it."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def options(self) -> dict[str, Any]:
        """The ``storage_options`` to reach it."""
        return {
            "key": "a-key-of-tests",
            "secret": "a-secret-of-tests",
            "endpoint_url": f"http://127.0.0.1:{self._port}",
            "client_kwargs": {"region_name": "us-east-1"},
            "config_kwargs": {"connect_timeout": 2, "read_timeout": 5, "retries": {"total_max_attempts": 1}},
        }

    def start(self) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + DEADLINE_SECS
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self._port}/moto-api/", timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def new_url(self, url: str | None = None) -> str:
        """Return the address of a folder in a new bucket, or make the bucket of ``url`` again."""
        bucket = f"bucket-{next(_numbers)}" if url is None else url.split("/")[2]
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}/{bucket}", method="PUT")
        urllib.request.urlopen(request, timeout=20).close()
        return f"s3://{bucket}/run-17"
