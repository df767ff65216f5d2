"""The digest kernel beside the reference of docs/stream.md, section 10, and what a digest must tell apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import TORCH_DTYPES

from torch_shardinit import _native, reference
from torch_shardinit.digest import add_sums, digest_parts, extent, tensor_digest, whole
from torch_shardinit.region import full_box, row_major_strides, slices, span

EDGES = (0, 1, 6, 2**32 - 17, 2**32, 2**40 + 3, 2**62 - 5)


def native(array: np.ndarray, size: int, first: int, steps: tuple[int, ...], threads: int = 1) -> bytes:
    strides = tuple(stride // size for stride in array.strides)
    return _native.digest([(array.ctypes.data, size, array.shape, strides, first, steps)], threads)[0]


def indices(shape: tuple[int, ...], first: int, steps: tuple[int, ...]) -> np.ndarray:
    index = np.full(shape, first, np.uint64)
    for dim, (n, step) in enumerate(zip(shape, steps, strict=True)):
        along = [-1 if d == dim else 1 for d in range(len(shape))]
        index = index + np.arange(n, dtype=np.uint64).reshape(along) * np.uint64(step)
    return index


def bits_of(size: int) -> np.dtype:
    return np.dtype(f"V{size}") if size == 16 else np.dtype(f"u{size}")


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_runs_equal_the_reference(isa: str, size: int) -> None:
    """At every length around a vector's, at odd addresses, and where the index's high half changes."""
    random = np.random.default_rng(size)
    raw = random.integers(0, 256, 1100 * size + 16, np.uint8)
    for n in (*range(20), 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000):
        data = raw[: n * size].tobytes()
        unaligned = np.frombuffer(b"x" * (n % 3) + data, np.uint8)[n % 3 :]
        for first in EDGES:
            index = np.arange(n, dtype=np.uint64) + np.uint64(first)
            want = reference.digest_sum(data, size, index)
            piece = (unaligned.ctypes.data, size, (n,), (1,), first, (1,))
            assert _native.digest([piece], 1) == [want], (isa, n, first)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_boxes_of_any_layout_equal_the_reference(isa: str, size: int) -> None:
    random = np.random.default_rng(10 + size)
    for _ in range(60):
        dims = int(random.integers(1, 5))
        shape = tuple(int(n) for n in random.integers(1, (300, 20, 9, 7)[dims - 1], dims))
        raw = random.integers(0, 256, (*(n + int(random.integers(0, 2)) for n in shape), size), np.uint8)
        array = raw.view(bits_of(size))[..., 0][tuple(slice(0, n) for n in shape)]
        order = tuple(int(d) for d in random.permutation(dims))
        array = array.transpose(order)
        steps = tuple(int(s) for s in random.choice([1, 3, 1000, 2**20 + 1, 2**31, 2**33], dims))
        first = int(random.choice(EDGES))
        want = reference.digest_sum(np.ascontiguousarray(array).tobytes(), size, indices(array.shape, first, steps))
        assert native(array, size, first, steps) == want, (isa, array.shape, array.strides, steps)


def test_threads_and_instruction_sets_give_one_sum() -> None:
    array = np.random.default_rng(0).integers(0, 2**32, 1_000_003, np.uint32)
    found = set()
    for isa in _native.available_isas():
        _native.force_isa(isa)
        found |= {native(array, 4, 2**32 - 500_000, (1,), threads) for threads in (1, 2, 3, 7)}
    _native.force_isa("")
    assert len(found) == 1


def test_error_native_arguments() -> None:
    for piece, message in [
        ((0, 3, (1,), (1,), 0, (1,)), "1, 2, 4, 8 or 16 bytes"),
        ((0, 4, (1,), (1,), 0, (1,)), "holds no memory"),
        ((0, 4, (1, 2), (1,), 0, (1, 1)), "as many strides and steps as sizes"),
        ((0, 4, (1,)), "6 fields"),
    ]:
        with pytest.raises(ValueError, match=message):
            _native.digest([piece], 1)
    assert _native.digest([(0, 4, (0,), (1,), 0, (1,))], 1) == [bytes(16)]


def test_known_answers() -> None:
    """Digest 1 is fixed: these may never change."""
    assert reference.digest_sum(bytes(4), 4, [0]).hex() == native(np.zeros(1, np.uint32), 4, 0, (1,)).hex()
    ramp = np.arange(1000, dtype=np.float32)
    assert native(ramp, 4, 0, (1,)).hex() == KNOWN_RAMP
    total = int.from_bytes(native(ramp, 4, 0, (1,)), "little")
    assert tensor_digest("float32", (10, 100), total) == KNOWN_DIGEST
    assert tensor_digest("float32", (10, 100), total) == reference.tensor_digest(
        "float32", (10, 100), total.to_bytes(16, "little")
    )


KNOWN_RAMP = "a041c3f0c9040fd9feaabb60527654aa"
KNOWN_DIGEST = "fe2387f376b51bc832f2c23edbec8962"


# ---- what a digest tells apart


def sum_of(tensor: torch.Tensor) -> int:
    (total,) = digest_parts([(tensor, (0,) * tensor.dim(), tuple(tensor.shape))])
    return total


def shard_sums(tensor: torch.Tensor, dim: int, parts: int) -> list[int]:
    found, at = [], 0
    for shard in tensor.chunk(parts, dim):
        offset = tuple(at if d == dim else 0 for d in range(tensor.dim()))
        found += digest_parts([(shard, offset, tuple(tensor.shape))])
        at += shard.shape[dim]
    return found


@pytest.mark.parametrize("dtype", [*TORCH_DTYPES.values(), torch.int64, torch.bool, torch.complex128, torch.uint8])
def test_shards_add_up_whatever_their_memory(dtype: torch.dtype) -> None:
    tensor = (torch.randn(13, 6, 10, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
    want = sum_of(tensor)
    for dim in range(3):
        for parts in (2, 3, 5):
            assert add_sums(shard_sums(tensor, dim, parts)) == want
    flat = tensor.reshape(-1)
    runs = [(flat[a:b], a, (13, 6, 10)) for a, b in ((0, 7), (7, 400), (400, 780))]
    assert add_sums(digest_parts(runs)) == want
    assert sum_of(tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0)) == want
    padded = torch.zeros(13, 6, 17).to(dtype)
    padded[..., 3:13] = tensor
    assert sum_of(padded[..., 3:13]) == want


def test_lazily_negated_and_conjugated_values_count() -> None:
    z = torch.randn(9, dtype=torch.complex64)
    assert sum_of(z.conj()) == sum_of(z.conj().resolve_conj()) != sum_of(z)
    assert sum_of(z.conj().imag) == sum_of(-z.imag)


def test_single_changes_in_ten_thousand_trials() -> None:
    """A flipped bit, two elements or rows swapped, a shift by one, an element exchanged between two tensors."""
    random = np.random.default_rng(7)
    base = random.standard_normal((64, 48)).astype(np.float32)
    other = random.standard_normal((64, 48)).astype(np.float32)
    zero = sum_of(torch.from_numpy(base))
    first_pair = (zero, sum_of(torch.from_numpy(other)))
    kinds = ["bit", "swap", "rows", "shift", "exchange"]
    for trial in range(10_000):
        changed = base.copy()
        kind = kinds[trial % 5]
        a, b = (int(k) for k in random.choice(base.size, 2, replace=False))
        if kind == "bit":
            changed.reshape(-1).view(np.uint32)[a] ^= np.uint32(1 << (trial // 5 % 32))
        elif kind == "swap":
            changed.reshape(-1)[[a, b]] = changed.reshape(-1)[[b, a]]
        elif kind == "rows":
            r, s = (int(k) for k in random.choice(64, 2, replace=False))
            changed[[r, s]] = changed[[s, r]]
        elif kind == "shift":
            low, high = sorted((a, b))
            changed.reshape(-1)[low : high + 1] = np.roll(changed.reshape(-1)[low : high + 1], 1)
        else:
            exchanged = other.copy()
            changed.reshape(-1)[a], exchanged.reshape(-1)[a] = other.reshape(-1)[a], base.reshape(-1)[a]
            assert sum_of(torch.from_numpy(exchanged)) != first_pair[1]
        assert not np.array_equal(changed, base)
        assert sum_of(torch.from_numpy(changed)) != zero, (kind, a, b)


def test_bits_count() -> None:
    zero, minus = torch.zeros(5), -torch.zeros(5)
    assert sum_of(zero) != sum_of(minus)
    assert sum_of(torch.zeros(5)) != sum_of(torch.zeros(4))
    assert sum_of(torch.zeros(0)) == 0
    nans = torch.tensor([0x7FC00000, 0x7FC00001, -0x400000], dtype=torch.int32).view(torch.float32)
    assert len({sum_of(one) for one in nans.unbind()}) == 3
    assert bool(torch.isnan(nans).all())
    for value in (0.0, 1.0, -1.0):  # constant tensors, among which nothing but the indices differs
        rows = torch.full((64, 64), value)
        columns = digest_parts([(rows[:, :63], (0, 0), (64, 64))])[0]
        assert len({sum_of(rows), sum_of(rows[:63]), columns}) == 3
        assert sum_of(rows[:63]) == sum_of(rows[:, :63])  # the shape tells them apart, in the digest
        assert tensor_digest("float32", (63, 64), 1) != tensor_digest("float32", (64, 63), 1)


def test_every_word_avalanches() -> None:
    """Flipping any bit of the value or of the index's low half flips each bit of u5 to u7 half the time: 2^15 samples,
    five standard deviations, a false alarm in 300 seeds, of which this is one. u4 is off by 0.04 at most, over 2^17."""
    random = np.random.default_rng(11)
    n = 1 << 15
    index = random.integers(0, 2**63, n, np.uint64)
    word = random.integers(0, 2**32, n, np.uint64)
    zero = reference.digest_mix(index, word)
    for bit in range(64):
        flip = np.uint64(1 << (bit % 32))
        moved = reference.digest_mix(index ^ (flip if bit >= 32 else np.uint64(0)), word ^ (flip if bit < 32 else 0))
        bits = np.unpackbits((zero ^ moved).view(np.uint8), axis=1, bitorder="little")
        rates = bits.mean(axis=0)
        worst = abs(rates - 0.5)
        assert worst[32:].max() < 0.014, (bit, worst[32:].max())
        assert worst[:32].max() < 0.06, (bit, worst[:32].max())


def test_no_collision_among_millions_of_single_changes() -> None:
    """Words that are no bijection of (index, value), cut to 48 bits: among 2 million distinct pairs, as alike as can
    be, a collision has a chance of 0.008."""
    index = np.repeat(np.arange(2048, dtype=np.uint64), 1024)
    word = np.tile(np.arange(1024, dtype=np.uint64), 2048)
    mixed = reference.digest_mix(index, word)
    for a, b in ((0, 2), (1, 3)):
        pairs = mixed[:, a].astype(np.uint64) << np.uint64(16) | mixed[:, b] >> 16
        assert np.unique(pairs).size == pairs.size, (a, b)


def test_truncated_to_32_bits_changes_collide_as_chance_has_it() -> None:
    """Each word alone, over 2^18 single changes: 8 collisions are expected; 30 or more would come once in 10^8 runs."""
    base = reference.digest_mix(np.arange(512, dtype=np.uint64), np.full(512, 0x3F800000))
    total = base.sum(axis=0, dtype=np.uint32)
    index = np.repeat(np.arange(512, dtype=np.uint64), 512)
    word = np.tile(np.uint64(0x3F800000) ^ np.arange(1, 513, dtype=np.uint64), 512)
    sums = total + reference.digest_mix(index, word) - base[index.astype(np.intp)]
    for k in range(4):
        assert sums.shape[0] - np.unique(sums[:, k]).size < 30, k


# ---- places


def test_extents_are_those_of_the_indices() -> None:
    shape = (5, 7, 4)
    index = np.arange(5 * 7 * 4).reshape(shape)
    for box in (full_box(shape), (span(2, 1, 3), span(0, 1, 7), span(1, 1, 2)), (span(3, 1, 1),) * 3):
        part = index[slices(box)]
        assert part.size and extent(box, shape) == (part.size, int(part.sum()))
    assert whole(shape) == (140, int(index.sum()))
    assert whole((2**31, 2**31)) == (2**62, 2**61 * (2**62 - 1) % 2**64)
    assert row_major_strides(shape) == (28, 4, 1)
