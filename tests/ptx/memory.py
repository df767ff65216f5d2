"""Global memory: buffers of the host mapped at 64-bit addresses of the device."""

from __future__ import annotations

import numpy as np

from .errors import LaneFault, MemoryFault, Misaligned, Race


class Buffer:
    """A contiguous uint8 array at an address. Elements are reached through views, so that the array itself changes."""

    def __init__(self, array: np.ndarray, address: int, writable: bool, count_writes: bool) -> None:
        self.array = array
        self.base = address
        self.end = address + array.size
        self.writable = writable
        self.counts = np.zeros(array.size, np.uint8) if count_writes else None
        self._views: dict[tuple[int, int], tuple[np.ndarray, int]] = {}

    def elements(self, element_bytes: int, count: int) -> tuple[np.ndarray, int]:
        """The buffer as rows of `count` elements at aligned device addresses, and the address of the first row."""
        key = (element_bytes, count)
        if key not in self._views:
            self._views[key] = self._rows(self.array, element_bytes, count)
        return self._views[key]

    def _rows(self, array: np.ndarray, element_bytes: int, count: int) -> tuple[np.ndarray, int]:
        row_bytes = element_bytes * count
        offset = -self.base % row_bytes
        num_rows = max(0, array.size - offset) // row_bytes
        shape = (num_rows, count) if num_rows else (0, count)
        view: np.ndarray = np.ndarray(shape, f"<u{element_bytes}", array.data, min(offset, array.size))
        return view, self.base + offset

    def count(self, addresses: np.ndarray, access_bytes: int) -> None:
        """Counts one write to each byte of each access; 255 stands for more."""
        if self.counts is not None:
            rows, first = self._rows(self.counts, 1, access_bytes)
            index = (addresses - np.uint64(first)) // np.uint64(access_bytes)
            now = rows[index]
            rows[index] = now + (now < 255)


class Memory:
    """Buffers at chosen addresses. Whatever lies outside them faults."""

    def __init__(self, count_writes: bool = False) -> None:
        self.count_writes = count_writes
        self.buffers: list[Buffer] = []

    def map(self, array: np.ndarray, address: int, writable: bool = True) -> int:
        """Maps a one-dimensional contiguous uint8 array at [address, address + size) and returns the address.

        Stores of kernels change the array. Raises ValueError where the range overlaps another one, or is no range of
        64-bit addresses.
        """
        if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
            raise ValueError(f"a mapped array must be contiguous, 1-D and uint8, got {array.dtype} {array.shape}")
        if writable and not array.flags.writeable:
            raise ValueError("a buffer that is mapped writable must be a writable array")
        if not (0 < address and address + array.size < 1 << 64):
            raise ValueError(f"[{address:#x}, +{array.size}) must lie in 64-bit addresses above 0")
        for other in self.buffers:
            if address < other.end and other.base < address + array.size:
                raise ValueError(f"[{address:#x}, +{array.size}) overlaps [{other.base:#x}, {other.end:#x})")
        self.buffers.append(Buffer(array, address, writable, self.count_writes))
        return address

    def write_counts(self, address: int) -> np.ndarray:
        """How many times each byte of the buffer mapped at `address` was written (255: or more).

        Raises ValueError unless this is Memory(count_writes=True).
        """
        for buffer in self.buffers:
            if buffer.base == address:
                if buffer.counts is None:
                    raise ValueError("writes are counted by Memory(count_writes=True) only")
                return buffer.counts
        raise ValueError(f"no buffer is mapped at {address:#x}")


def _locate(buffers: list[Buffer], addresses: np.ndarray, access_bytes: int, what: str) -> Buffer | np.ndarray:
    """The buffer that holds all accesses, or the number of the buffer of each. Checks alignment and bounds."""
    crooked = (addresses & np.uint64(access_bytes - 1)) != 0
    if crooked.any():
        lane = int(np.argmax(crooked))
        raise LaneFault(
            Misaligned, f"{what} of {access_bytes} bytes must be aligned to them", lane, int(addresses[lane])
        )
    low, high = int(addresses.min()), int(addresses.max())
    for buffer in buffers:
        if buffer.base <= low and high + access_bytes <= buffer.end:
            return buffer
    owner = np.full(addresses.shape, -1)
    for number, buffer in enumerate(buffers):
        if buffer.end - buffer.base >= access_bytes:
            last = np.uint64(buffer.end - access_bytes)
            owner[(addresses >= np.uint64(buffer.base)) & (addresses <= last)] = number
    lost = owner < 0
    if lost.any():
        lane = int(np.argmax(lost))
        raise LaneFault(MemoryFault, f"{what} of {access_bytes} bytes outside every buffer", lane, int(addresses[lane]))
    return owner


def load(buffers: list[Buffer], addresses: np.ndarray, element_bytes: int, count: int) -> np.ndarray:
    """addresses: uint64, (lanes,). Returns unsigned integers, (lanes, count)."""

    def read(buffer: Buffer, at: np.ndarray) -> np.ndarray:
        rows, first = buffer.elements(element_bytes, count)
        return rows[(at - np.uint64(first)) // np.uint64(element_bytes * count)]

    owner = _locate(buffers, addresses, element_bytes * count, "load")
    if isinstance(owner, Buffer):
        return read(owner, addresses)
    result = np.empty((addresses.size, count), f"u{element_bytes}")
    for number in np.unique(owner):
        lanes = owner == number
        result[lanes] = read(buffers[number], addresses[lanes])
    return result


def store(buffers: list[Buffer], addresses: np.ndarray, values: np.ndarray) -> None:
    """addresses: uint64, (lanes,); values: unsigned integers, (lanes, elements)."""
    element_bytes, count = values.dtype.itemsize, values.shape[1]
    access_bytes = element_bytes * count
    owner = _locate(buffers, addresses, access_bytes, "store")
    _check_race(addresses)
    if isinstance(owner, Buffer):
        parts = [(owner, np.arange(addresses.size))]
    else:
        parts = [(buffers[number], np.flatnonzero(owner == number)) for number in np.unique(owner)]
    for buffer, lanes in parts:
        at = addresses[lanes]
        if not buffer.writable:
            raise LaneFault(MemoryFault, "store to read-only memory", int(lanes[0]), int(at[0]))
        rows, first = buffer.elements(element_bytes, count)
        rows[(at - np.uint64(first)) // np.uint64(access_bytes)] = values[lanes]
        buffer.count(at, access_bytes)


def _check_race(addresses: np.ndarray) -> None:
    """Accesses of one size are aligned, so two of them overlap only where they are the same."""
    if addresses.size < 2 or (addresses[1:] > addresses[:-1]).all():
        return
    order = np.argsort(addresses, kind="stable")
    same = addresses[order[1:]] == addresses[order[:-1]]
    if same.any():
        lane = int(order[1:][np.argmax(same)])
        raise LaneFault(Race, "two threads store to the same bytes in one instruction", lane, int(addresses[lane]))
