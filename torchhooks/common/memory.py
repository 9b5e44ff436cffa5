"""Reading the memory of tensors on the CPU, and nothing but reading it.

``Tensor.numpy()`` makes the storage of a tensor one that cannot be resized, for as long as it exists. A later
``resize_()`` of the script then fails, or one of torch, whose fake quantization makes some. So the package calls it
only on tensors that no other code has, and reads the others with these functions.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import torch


def bytes_of(tensor: torch.Tensor) -> memoryview[Any]:
    """Return the memory of ``tensor``, which is on the CPU and contiguous.

    Raises:
        RuntimeError: ``tensor`` has no memory.
    """
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    if nbytes and not address:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} has no memory: its storage may have been resized to nothing"
        )
    buffer = (ctypes.c_char * nbytes).from_address(address)
    # ctypes does not own the memory. A memoryview, and an array made of one, keep the buffer, and the buffer keeps the
    # tensor, so that torch does not free the memory while one of them exists.
    vars(buffer)["tensor"] = tensor
    return memoryview(buffer)


def array_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the array that ``tensor.detach().numpy()`` returns, or a copy if ``tensor`` is not contiguous.

    Raises:
        TypeError: NumPy does not have the dtype or the layout, or ``tensor`` is not on the CPU.
        RuntimeError: ``tensor`` has no memory.
    """
    is_on_host = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cpu
    is_plain = is_on_host and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
    # Of a conjugate or negated tensor, the memory has the values before that: torch only notes the operation in a bit.
    if not is_plain or tensor.is_conj() or tensor.is_neg():
        return tensor.detach().clone().numpy()  # raises an error, but for an ordinary subclass
    return np.frombuffer(bytes_of(tensor.contiguous()), _dtype_of(tensor.dtype)).reshape(tensor.shape)


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of ``tensor`` in an ordinary one: dense, not quantized, and not half a complex number.

    Raises:
        RuntimeError: ``tensor`` is a nested tensor, or one of a class that does not have the operation.
    """
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.dtype is torch.complex32:
        tensor = tensor.to(torch.complex64)
    return tensor.resolve_conj().resolve_neg()


@functools.cache
def _dtype_of(dtype: torch.dtype) -> np.dtype[Any]:
    # On the CPU by name, because the script may have set another default device. No other code has this tensor.
    return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
