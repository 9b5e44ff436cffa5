"""The program of the fork server: it imports torch and the rest once, and forks a process for each request.

:mod:`support.processes` starts it and talks to it. Its first argument is the descriptor of the socket it listens at. It
ends with the process that has started it, whose pipe is its standard input, and then kills what it has forked.

A forked process leaves the loop below and runs its program at the top level of the interpreter. So it ends as that of
any program does: it waits for threads, and calls what was registered with ``atexit``.
"""

import atexit
import gc
import importlib.util
import os
import pickle
import select
import signal
import socket
import sys
import types
from contextlib import suppress


@atexit.register  # first, so that it is called last
def exit_at_once() -> None:
    """End a process whose function has returned without taking its modules apart, which takes 0.3 s."""
    if getattr(sys.modules["__main__"], "only_exit", False):
        sys.stdout.flush()
        os._exit(0)


IMPORTED = (
    "torch",
    "torch._dynamo",  # imported by the first optimizer
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.profiler",
    "torch.utils.tensorboard",
    "torchhooks",
    "torchhooks.tools.ledger.checked",
    "torchhooks.tools.ledger.hook",
    "torchhooks.summary.tensorboard",
    "torchhooks.testing",
    "torchhooks.tools.watch.stalls",
    # Imported by files of tests, of which a process calls a function.
    "hypothesis",
    "pytest",
    "tensorboard.backend.event_processing.plugin_event_accumulator",
    "support.defects",
    "support.patterns",
    "support.rank_processes",
    "support.rank_training",
)

os.fsync = lambda fd: None  # no test simulates a power failure, and a kill loses nothing that was written
listener = socket.socket(fileno=int(sys.argv[1]))
signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is for the process of pytest
for name in IMPORTED:
    if not name.startswith("torchhooks.tools.") or importlib.util.find_spec("torchhooks.tools"):
        importlib.import_module(name)
gc.freeze()  # a collection in a forked process would copy the memory that it shares with this one
# select() returns when a process has ended.
signalled, signals = os.pipe()
for descriptor in (signalled, signals):
    os.set_blocking(descriptor, False)
signal.signal(signal.SIGCHLD, lambda *_: None)
signal.set_wakeup_fd(signals, warn_on_full_buffer=False)
connections: dict[int, socket.socket] = {}  # by the process, until it has ended

while True:
    ready = select.select([sys.stdin, listener, signalled], [], [])[0]
    if sys.stdin in ready:
        for process in connections:
            os.kill(process, signal.SIGKILL)
        sys.exit()
    if signalled in ready:
        os.read(signalled, 1 << 16)
        for process in [*connections]:
            waited_for, status = os.waitpid(process, os.WNOHANG)
            if waited_for == process:
                with connections.pop(process) as connection, suppress(OSError):  # its client may be gone
                    connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    if listener in ready:
        connection, _ = listener.accept()
        try:
            with connection.makefile("rb") as file:
                request = pickle.load(file)
        except (EOFError, OSError, pickle.UnpicklingError):  # the client is gone
            connection.close()
            continue
        process = os.fork()
        if not process:
            break
        connections[process] = connection
        with suppress(OSError):
            connection.sendall(b"%d\n" % process)

signal.set_wakeup_fd(-1)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
for of_server in (listener, connection, *connections.values()):
    of_server.close()
for descriptor in (signalled, signals):
    os.close(descriptor)
if request.new_session:
    os.setsid()
os.environ.clear()
os.environ.update(request.environment)
os.chdir(request.folder)
sys.path[:], sys.argv[:] = request.path, request.arguments
for number, file in enumerate(request.files):
    os.dup2(os.open(file, os.O_RDWR | os.O_APPEND), number)
sys.modules["__main__"] = main = types.ModuleType("__main__")
exec(compile(request.program, "<string>", "exec"), main.__dict__)
