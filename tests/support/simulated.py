"""A real PyTorch device that is asynchronous, for machines without an accelerator: see ``simulated_device.cpp``.

:func:`register` builds it, which takes half a minute, unless the folder in which torch builds extensions has it. It
cannot be unregistered, and has to be registered before the first backward pass of the process. The device type is
``"simulated"``.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import backend_registration, cpp_extension

SOURCE = Path(__file__).with_name("simulated_device.cpp")
NAME = "simulated"

_library: Any = None


def register() -> None:
    """Build and register the device, once per process."""
    global _library
    if _library is not None:
        return
    _library = ctypes.CDLL(str(built()))
    _library.simulated_waits.restype = ctypes.c_char_p
    _library.simulated_hazards.restype = ctypes.c_int64
    _library.simulated_is_forked.restype = ctypes.c_bool
    backend_registration.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())  # noqa: SLF001 - documented for backends
    backend_registration.generate_methods_for_privateuse1_backend()
    atexit.register(_library.simulated_finish)


def built() -> Path:
    """Return the library for this version of torch, after building it if there is none yet."""
    # torch.utils.cpp_extension.load() needs ninja. One file needs only the compiler.
    text = SOURCE.read_bytes() + f"{torch.__version__} {sys.version}".encode()
    folder = Path(cpp_extension.get_default_build_root(), "torchhooks_simulated_device")
    library = folder / f"{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        folders = [f"-isystem{path}" for path in cpp_extension.include_paths()]
        folders += [f"-L{path}" for path in cpp_extension.library_paths()]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        options = ["-shared", "-fPIC", "-std=c++20", "-O1", abi, *folders]
        libraries = ["-lc10", "-ltorch_cpu", "-ltorch"]
        done = subprocess.run(
            [str(compiler()), *options, str(SOURCE), "-o", str(unfinished), *libraries],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{SOURCE.name} was not compiled:\n{done.stderr}")
        unfinished.replace(library)  # another process may build it, too
    return library


def compiler() -> str | None:
    """Return the path of the C++ compiler; ``None`` if there is none."""
    return shutil.which(os.environ.get("CXX", "c++"))


def needs_compiler() -> None:
    """Skip the test without a C++ compiler, and fail in the gate."""
    if torch.__version__ < "2.10":  # compared as versions
        pytest.skip("the simulated device needs the headers of torch 2.10")
    if compiler() is None:
        why = "the simulated device needs a C++ compiler, such as g++"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)


def sleep(secs: float) -> None:
    """Queue work on the current stream that takes ``secs``."""
    _library.simulated_sleep(ctypes.c_double(1e3 * secs))


def fail(text: str) -> None:
    """Queue work on the current stream that fails. The next wait raises the error."""
    _library.simulated_fail(text.encode())


def waits() -> list[str]:
    """Return what this thread has waited for since the last :func:`forget_waits`."""
    return str(_library.simulated_waits(), "ascii").split()


def forget_waits() -> None:
    """Count the waits of this thread from zero."""
    _library.simulated_forget_waits()


def hazards() -> int:
    """Return how many copies from or into pageable memory did not wait, which on other devices is a race."""
    return int(_library.simulated_hazards())


@contextmanager
def slow_pinning(secs_per_gb: float) -> Iterator[None]:
    """Have pinned memory take ``secs_per_gb`` to allocate, as on a real device."""
    _library.simulated_pin_slowly(ctypes.c_double(secs_per_gb / 1e9))
    try:
        yield
    finally:
        _library.simulated_pin_slowly(ctypes.c_double(0.0))


def support_float64(whether: bool) -> None:
    """Have the device support float64 or not."""
    _library.simulated_support_float64(ctypes.c_bool(whether))
    if hasattr(torch.accelerator, "get_device_capability"):
        torch.accelerator.get_device_capability.cache_clear()


def _module() -> types.ModuleType:
    """Return what PyTorch expects as ``torch.simulated``."""
    module = types.ModuleType(f"torch.{NAME}")

    def index(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        number = None if device is None else torch.device(device).index
        return torch.accelerator.current_device_index() if number is None else number

    def get_rng_state(device: Any = None) -> torch.Tensor:
        state = torch.empty(_library.simulated_random_state(index(device), None), dtype=torch.uint8, device="cpu")
        _library.simulated_random_state(index(device), ctypes.c_void_p(state.data_ptr()))
        return state

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        _library.simulated_set_random_state(index(device), ctypes.c_void_p(state.contiguous().data_ptr()))

    def manual_seed_all(seed: int) -> None:
        for device in range(2):
            _library.simulated_seed(device, ctypes.c_uint64(seed))

    for function in (get_rng_state, set_rng_state, manual_seed_all):
        setattr(module, function.__name__, function)
    for name, value in {
        "device_count": lambda: 2,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": torch.accelerator.current_device_index,
        "set_device": torch.accelerator.set_device_index,
        "synchronize": torch.accelerator.synchronize,
        "_is_in_bad_fork": _library.simulated_is_forked,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    }.items():
        setattr(module, name, value)
    sys.modules[module.__name__] = module
    return module
