"""Programs that are given as text, each in a new interpreter, or in a fork of one that has imported torch."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

# A program runs at the top level of the interpreter, so that its process ends as that of any script.
FORKING = """
import json, os, sys
import torch._dynamo, torchhooks, torchhooks.summary.tensorboard
for line in sys.stdin:
    process = os.fork()
    if not process:
        break
    print(os.waitpid(process, 0)[1], flush=True)
else:
    sys.exit()
program, sys.argv[1:], *files = json.loads(line)
for number, file in enumerate(files):
    os.dup2(os.open(file, os.O_RDWR), number)
exec(compile(program, "<string>", "exec"))
"""


def run_program(program: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``program`` to its end, with ``arguments`` in ``sys.argv``, and return its exit code and what it printed."""
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def fork_program(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Do the same in a process that has imported torch and torchhooks, which takes most programs more than a second."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "stdout"), Path(folder, "stderr")
        for file in (out, err):
            file.touch()
        request = [textwrap.dedent(program), arguments, os.devnull, str(out), str(err)]
        print(json.dumps(request), file=server.stdin, flush=True)
        code = os.waitstatus_to_exitcode(int(server.stdout.readline()))
        return subprocess.CompletedProcess(program, code, out.read_text(), err.read_text())


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen([sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)  # closes its stdin, at which it ends
    return server
