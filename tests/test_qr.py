"""The QR of orthogonal_: its order of operations, written again in NumPy, gives the same bits on every instruction set
and for any number of threads."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import pytest
import torch
from conftest import assert_bitwise_equal

from torch_shardinit import _native

PANEL = 32


def orthonormalise(matrix: np.ndarray, num_threads: int = 1) -> np.ndarray:
    result = np.ascontiguousarray(matrix).copy()
    _native.orthonormalise(result.ctypes.data, *result.shape, num_threads)
    return result


def sum_of_products(v: np.ndarray, c: np.ndarray) -> np.ndarray:
    """v.T @ c with its sums over ascending rows, each product rounded first."""
    total = np.zeros((v.shape[1], c.shape[1]))
    for row in range(v.shape[0]):
        total = total + v[row, :, None] * c[row, None, :]
    return total


def reference(matrix: np.ndarray) -> np.ndarray:
    """csrc/qr.h, column by column."""
    a = matrix.astype(np.float64).copy()
    rows, cols = a.shape
    signs = np.zeros(cols)
    panels = []
    for first in range(0, cols, PANEL):
        width = min(PANEL, cols - first)
        v, t = np.zeros((rows, width)), np.zeros((width, width))
        for c in range(width):
            k = first + c
            squares = 0.0
            for x in a[k + 1 :, k].tolist():
                squares = squares + x * x
            alpha = beta = float(a[k, k])
            v[k, c] = 1
            if squares:
                norm = float(np.sqrt(alpha * alpha + squares))
                beta = -norm if alpha > 0 else norm
                tau = (beta - alpha) / beta
                v[k + 1 :, c] = a[k + 1 :, k] / (alpha - beta)
                part = a[k:, first : first + width]
                sums = sum_of_products(v[k:, c : c + 1], part)
                part -= v[k:, c : c + 1] * (tau * sums)
                t[c, c] = tau
            signs[k] = np.sign(beta)
        products = sum_of_products(v[first:], v[first:])
        for c in range(width):
            for r in range(c):
                total = 0.0
                for q in range(r, c):
                    total = total + t[r, q] * products[q, c]
                t[r, c] = -t[c, c] * total
        panels.append((first, v, t))
        block(a[first:, first + width :], v[first:], t.T)
    result = np.zeros((rows, cols))
    for first, v, t in reversed(panels):
        for c in range(v.shape[1]):
            result[first + c, first + c] = 1
        block(result[first:, first:], v[first:], t)
    return result * signs


def block(c: np.ndarray, v: np.ndarray, t: np.ndarray) -> None:
    """c -= v @ (t @ (v.T @ c)), in place."""
    c -= sum_of_products(v.T.copy(), sum_of_products(t.T.copy(), sum_of_products(v, c)))


def normals(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([rows, cols, seed]).standard_normal((rows, cols))


SHAPES = [(1, 1), (2, 1), (7, 5), (31, 31), (32, 32), (33, 33), (40, 32), (65, 64), (70, 45), (131, 97), (200, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(isa: str, shape: tuple[int, int]) -> None:
    matrix = normals(*shape)
    assert_bitwise_equal(orthonormalise(matrix).view(np.uint64), reference(matrix).view(np.uint64), f"{isa} {shape}")


def test_any_number_of_threads(isa: str) -> None:
    matrix = normals(300, 260)
    want = orthonormalise(matrix).view(np.uint64)
    for num_threads in (2, 3, 7, 300):
        assert_bitwise_equal(orthonormalise(matrix, num_threads).view(np.uint64), want, f"{num_threads} threads")
    assert not np.array_equal(orthonormalise(normals(300, 260, seed=1)).view(np.uint64), want)


@pytest.mark.parametrize("shape", [(5, 5), (64, 20), (300, 299)], ids=str)
def test_is_the_q_of_a_triangle_with_positive_diagonal(shape: tuple[int, int]) -> None:
    matrix = normals(*shape)
    q = orthonormalise(matrix)
    assert np.abs(q.T @ q - np.eye(shape[1])).max() < 1e-14 * shape[0]
    r = q.T @ matrix
    assert np.abs(np.tril(r, -1)).max() < 1e-13 * shape[0] and np.diag(r).min() > 0
    want, triangle = torch.linalg.qr(torch.from_numpy(matrix))
    want = want * torch.diag(triangle).sign()
    assert np.abs(q - want.numpy()).max() < 1e-12, "the Q that torch.nn.init.orthogonal_ takes"


def test_matrices_without_full_rank() -> None:
    assert np.array_equal(orthonormalise(np.zeros((3, 2))), np.zeros((3, 2))), "sign of 0 is 0"
    assert np.array_equal(orthonormalise(np.eye(4)[:, :3]), np.eye(4)[:, :3])
    assert np.array_equal(orthonormalise(-np.eye(3)), -np.eye(3))
    assert np.isnan(orthonormalise(np.full((3, 2), np.nan))).all()


@pytest.mark.parametrize("rounding", [0x400, 0x800, 0xC00])
def test_the_rounding_mode_of_the_caller_does_not_count(rounding: int) -> None:
    matrix = normals(40, 33)
    want = orthonormalise(matrix)
    libm = ctypes.CDLL("libm.so.6")
    try:
        assert libm.fesetround(rounding) == 0
        got = orthonormalise(matrix)
    finally:
        libm.fesetround(0)
    assert_bitwise_equal(got.view(np.uint64), want.view(np.uint64))


def test_error_shapes() -> None:
    data = np.zeros((2, 3))
    for pointer, rows, cols in [(data.ctypes.data, 2, 3), (data.ctypes.data, 2, 0)]:
        with pytest.raises(ValueError, match="rows must be >= cols >= 1"):
            _native.orthonormalise(pointer, rows, cols, 1)
    for pointer in (0, data.ctypes.data + 4):
        with pytest.raises(ValueError, match="memory must be fp64"):
            _native.orthonormalise(pointer, 3, 2, 1)


def test_takes_about_a_second() -> None:
    """1024 x 1024: 0.07 s with AVX-512, 0.2 s without; the bound leaves room for a busy machine."""
    matrix = normals(1024, 1024)
    start = time.process_time()
    orthonormalise(matrix, 2)
    assert time.process_time() - start < 2
