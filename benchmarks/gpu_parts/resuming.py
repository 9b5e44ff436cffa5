"""Whether a script on the device resumes with the same bits after it was killed, and what ``check`` says of it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from gpu_parts import DEVICE, ROOT, SCRIPTS, Options, environment, run, script


def resume(options: Options) -> Iterator[str]:
    """Kill a script, stop it by SIGTERM, and compare its bits with those of an uninterrupted one."""
    with TemporaryDirectory(dir=options.results) as folder:
        whole_command = [sys.executable, *script("resume", Path(folder, "whole"))]
        with subprocess.Popen(whole_command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as whole:
            where = Path(folder, "killed")
            run(script("resume", where, "--die-at", 47), options.secs, -signal.SIGKILL)
            yield "Killed after step 47."
            run(script("resume", where, "--die-at", 63, "--signal", "SIGTERM"), options.secs, -signal.SIGTERM, 143)
            yield "Stopped by SIGTERM after step 63."
            ends = last_line(run(script("resume", where), options.secs))
            assert whole.stdout is not None
            expected = last_line(whole.stdout.read())
        yield f"In one process: {expected}. In three: {ends}."
        assert bits_in(ends) == bits_in(expected), "the bits differ"


def last_line(printed: str) -> str:
    """Return the last line of what a script has printed."""
    assert printed.strip(), "the script printed nothing"
    return printed.strip().splitlines()[-1]


def bits_in(line: str) -> str:
    """Return the bits in the last line of a script."""
    bits: str = re.findall("bits (.*)", line)[0]
    return bits


def check(options: Options) -> Iterator[str]:
    """Have ``python -m torchhooks check`` prove that the same script resumes exactly."""
    with TemporaryDirectory(dir=options.results) as folder:
        command = ["-m", "torchhooks", "check", "--steps", "60", str(SCRIPTS / "resume.py")]
        command += ["--", folder, "--device", DEVICE]
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
        )
    yield f"It ended with exit status {done.returncode}:"
    yield f"```text\n{done.stdout.strip()[-2500:]}\n```"
    assert done.returncode == 0, f"check does not call the script exact\n{done.stderr[-2000:]}"
