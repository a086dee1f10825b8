"""Files of arrays between the stages: .npy records one after the other, read as memory maps."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray


def write_arrays(path: Path, *arrays: NDArray[Any], append: bool = False) -> None:
    """Write arrays into one file, or add them at its end; equal arrays give equal bytes."""
    with path.open("ab" if append else "wb") as out:
        for array in arrays:
            npy.write_array(out, np.ascontiguousarray(array), allow_pickle=False)


def write_parts(path: Path, shape: tuple[int, ...], dtype: Any, parts: Iterable[NDArray[Any]]) -> None:
    """Write one array whose parts follow one another, without holding it."""
    with path.open("wb") as out:
        header = {"shape": shape, "fortran_order": False, "descr": npy.dtype_to_descr(np.dtype(dtype))}
        npy.write_array_header_1_0(out, header)
        for part in parts:
            np.ascontiguousarray(part, dtype).tofile(out)


def read_arrays(path: str | Path) -> list[NDArray[Any]]:
    """Return the arrays of a file as read-only views of one memory map, which takes one file descriptor."""
    found: list[NDArray[Any]] = []
    end = Path(path).stat().st_size
    with Path(path).open("rb") as file:
        # As a plain array, since slices of a memmap are slow.
        data = np.asarray(np.memmap(file, np.uint8, mode="r")) if end else np.zeros(0, np.uint8)
        file.seek(0)
        while file.tell() < end:
            version = npy.read_magic(file)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, dtype = read(file)
            start = file.tell()
            stop = start + dtype.itemsize * int(np.prod(shape))
            found.append(data[start:stop].view(dtype).reshape(shape))
            file.seek(stop)
    return found


def power_of_two(n: float) -> int:
    """Return the smallest power of two that is at least n, and at least 1."""
    return 1 << max(int(np.ceil(np.log2(max(n, 1)))), 0)


def partitioned(keys: NDArray[np.uint64], partitions: int) -> list[Any]:
    """Return the positions of each partition's keys, by their upper bits."""
    if partitions == 1:
        return [slice(None)]
    numbers = (keys >> np.uint64(64 - (partitions - 1).bit_length())).astype(np.int64)
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.searchsorted(numbers[order], np.arange(1, partitions)))
