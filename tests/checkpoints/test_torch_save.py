"""``torch.save`` for checkpoints."""

import gc
import io
import weakref

import numpy as np
import pytest
import torch

from torchhooks.checkpoints.torch_save import save


class Unpicklable:
    def __reduce__(self) -> str:
        raise RuntimeError("cannot be pickled")


def test_what_is_saved_can_be_loaded() -> None:
    file = io.BytesIO()
    save({"value": torch.arange(3), "step": 7}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert (loaded["value"].tolist(), loaded["step"]) == ([0, 1, 2], 7)


def test_memory_of_the_state_is_freed_without_a_garbage_collection() -> None:
    gc.disable()
    try:
        array = np.zeros(1000)  # a storage cannot be referred to weakly, but it keeps the array that it is made of
        reference = weakref.ref(array)
        save({"value": torch.from_numpy(array)}, io.BytesIO())
        del array
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("before", [False, True])
def test_the_option_for_checksums_is_put_back_even_after_an_error(before: bool) -> None:
    torch.serialization.set_crc32_options(before)
    try:
        with pytest.raises(RuntimeError, match="cannot be pickled"):
            save({"value": Unpicklable()}, io.BytesIO())
        assert torch.serialization.get_crc32_options() is before
    finally:
        torch.serialization.set_crc32_options(True)
