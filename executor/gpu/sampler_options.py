"""What the sampler's kernels read of each row of the batch, and how it gets to the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT = 256  # so that kernels find each array as well aligned as an allocation of its own


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy on the device, which the host doesn't wait for: torch keeps the pinned block until the
    copy is done.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)


class Mirrored:
    """Arrays of the host with mirrors on the device that have fixed addresses (CUDA graphs read
    them). All are of one block of memory, which one copy brings over.

    Write to `host`, set `changed`, and call `upload` before kernels read `device`.
    """

    def __init__(
        self, fields: Mapping[str, tuple[Any, tuple[int, ...]]], device: torch.device
    ) -> None:
        """fields: numpy type and shape of each array. All start as zeros."""
        self.host: dict[str, NDArray[Any]] = {}
        self.device: dict[str, torch.Tensor] = {}
        self.changed = False
        places, size = {}, 0
        for name, (dtype, shape) in fields.items():
            length = int(np.prod(shape)) * np.dtype(dtype).itemsize
            places[name] = slice(size, size + length)
            size += -(-length // _ALIGNMENT) * _ALIGNMENT
        self._block = np.zeros(size, np.uint8)
        self._mirror = torch.zeros(size, dtype=torch.uint8, device=device)
        for name, (dtype, shape) in fields.items():
            self.host[name] = self._block[places[name]].view(dtype).reshape(shape)
            kind = torch.from_numpy(np.empty(0, dtype)).dtype
            self.device[name] = self._mirror[places[name]].view(kind).view(shape)

    def upload(self) -> None:
        if self.changed:
            block = torch.from_numpy(self._block)
            if self._mirror.is_cuda:
                block = block.pin_memory()
            self._mirror.copy_(block, non_blocking=True)
            self.changed = False


class FlatLists:
    """Lists of any length, one for each row, on the device end to end. All columns are 32 bits.

    first_R, number_R: where a row's list begins and how long it is, arrays of a `Mirrored`.
    """

    def __init__(
        self,
        first_R: NDArray[np.int32],
        number_R: NDArray[np.int32],
        dtypes: tuple[Any, ...],
        device: torch.device,
    ) -> None:
        self._first, self._number = first_R, number_R
        self._dtypes, self._device = dtypes, device
        self._lists: dict[int, list[NDArray[Any]]] = {}
        self._changed = False
        # One element, which no list has: a kernel is given an address at least.
        self.columns = [to_device(np.zeros(1, dtype), device) for dtype in dtypes]

    def put(self, row: int, *columns: Any) -> None:
        """The list of `row` from now on."""
        pairs = zip(columns, self._dtypes, strict=True)
        arrays = [np.asarray(column, dtype) for column, dtype in pairs]
        had = self._lists.pop(row, None)
        if len(arrays[0]):
            self._lists[row] = arrays
            self._changed = True
        elif had is None:
            return
        self._number[row] = len(arrays[0])

    def upload(self) -> None:
        """Comes before the upload of `first_R` and `number_R`."""
        if self._changed:
            start = 0
            for row, (first, *_) in self._lists.items():
                self._first[row] = start
                start += len(first)
            columns = zip(*self._lists.values(), strict=True)
            self.columns = [to_device(np.concatenate(parts), self._device) for parts in columns]
            self._changed = False
