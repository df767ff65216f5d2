"""eye_, dirac_, orthogonal_ and sparse_ in recordings: what stock torch gives where that is no random number, the
stream's own definition (docs/stream.md, section 9) where it is."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn as nn
from conftest import assert_bitwise_equal, patterns
from recorded_models import eager, interpreted
from test_qr import orthonormalise
from torch.nn.init import orthogonal_ as orthogonal_by_another_name

import torch_shardinit as shardinit
from torch_shardinit import reference
from torch_shardinit.program import Exact, Played
from torch_shardinit.stream import tensor_id

SEED = 23
Write = Callable[[torch.Tensor], object]


class One(nn.Module):
    def __init__(self, shape: tuple[int, ...], write: Write, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(shape, dtype=dtype))
        with torch.no_grad():
            write(self.w)


def program_of(shape: tuple[int, ...], write: Write, dtype: torch.dtype = torch.float32) -> Exact | Played:
    with shardinit.recording():
        model = One(shape, write, dtype)
    program = shardinit.record(model).lookup("w").program  # type: ignore[union-attr]
    assert isinstance(program, (Exact, Played)), program
    return program


def initialised(
    shape: tuple[int, ...], write: Write, dtype: torch.dtype = torch.float32, seed: int = SEED
) -> torch.Tensor:
    with shardinit.recording():
        model = One(shape, write, dtype)
    return shardinit.init_model_(model, seed, device="cpu").w.detach()  # type: ignore[union-attr, return-value]


def normals(shape: tuple[int, ...], name: str = "w", draw: int = 0) -> np.ndarray:
    """By the NumPy reference, in fp64."""
    index = np.arange(math.prod(shape))
    bits = reference.normal(index, 1.0, 0.0, dtype="float64", seed=SEED, tensor_id=tensor_id(name, draw))
    return bits.view(np.float64).reshape(shape)


def orthogonal(z: np.ndarray, gain: float = 1.0) -> np.ndarray:
    matrix = z.reshape(z.shape[0], -1)
    wide = matrix.shape[1] > matrix.shape[0]
    q = orthonormalise(matrix.T if wide else matrix)
    return ((q.T if wide else q) * gain).reshape(z.shape)


EXACT: dict[str, tuple[tuple[int, ...], Write]] = {
    "square": ((5, 5), nn.init.eye_),
    "wide": ((3, 7), nn.init.eye_),
    "one_column": ((4, 1), nn.init.eye_),
    "part": ((6, 7), lambda w: (w.fill_(2), nn.init.eye_(w[1:5, 2:5]))),
    "transposed": ((4, 6), lambda w: nn.init.eye_(w.t())),
    "strided": ((9, 9), lambda w: (w.zero_(), nn.init.eye_(w[::2, 1::3]))),
    "of_a_stack": ((3, 4, 5), lambda w: [nn.init.eye_(one) for one in w]),
    "in_the_middle": ((4, 3, 5), lambda w: [nn.init.eye_(w[:, i]) for i in range(3)]),
    "copied": ((4, 4), lambda w: w.copy_(torch.eye(4))),
    "scaled": ((4, 5), lambda w: (nn.init.eye_(w), w.mul_(3).sub_(0.25).clamp_(-1, 2))),
    "identity_plus_row": ((4, 4), lambda w: (nn.init.eye_(w), w[1].add_(1), w[2, 2:].fill_(7))),
    "dirac": ((4, 6, 3), nn.init.dirac_),
    "dirac_groups": ((8, 3, 2, 5), lambda w: nn.init.dirac_(w, 2)),
    "dirac_depthwise": ((6, 1, 3, 3), lambda w: nn.init.dirac_(w, 6)),
    "dirac_few_inputs": ((6, 1, 3), lambda w: nn.init.dirac_(w, 2)),
    "dirac_3d": ((4, 4, 3, 2, 1), lambda w: (nn.init.dirac_(w), w.mul_(0.5))),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_identities_are_exact_steps_and_equal_torch(name: str, dtype: torch.dtype) -> None:
    shape, write = EXACT[name]
    want = One(shape, write, dtype).w.detach()
    assert isinstance(program_of(shape, write, dtype), Exact)
    assert_bitwise_equal(patterns(initialised(shape, write, dtype)), patterns(want), name)
    got = interpreted(shardinit.record(recorded_one(shape, write, dtype)))["w"]
    assert_bitwise_equal(patterns(got), patterns(want), name)


def recorded_one(shape: tuple[int, ...], write: Write, dtype: torch.dtype) -> nn.Module:
    with shardinit.recording():
        return One(shape, write, dtype)


PLAYED: dict[str, tuple[tuple[int, ...], Write]] = {
    "eye_after_which_torch": ((4, 4), lambda w: (nn.init.eye_(w), w.exp_())),
    "dirac_after_which_torch": ((4, 4, 3), lambda w: (nn.init.dirac_(w), w.cumsum_(0))),
    "part_of_an_eye": ((3, 4), lambda w: w.copy_(torch.eye(6)[1:4, 2:])),
    "expanded": ((2, 3, 3), lambda w: w.copy_(torch.eye(3))),
    "dirac_of_a_part": ((4, 4, 3), lambda w: (w.zero_(), nn.init.dirac_(w[1:3]))),
}


@pytest.mark.parametrize("name", PLAYED)
def test_other_identities_are_played(name: str) -> None:
    shape, write = PLAYED[name]
    assert isinstance(program_of(shape, write), Played)
    want = eager(lambda: One(shape, write))["w"]
    assert_bitwise_equal(patterns(initialised(shape, write)), patterns(want), name)


def test_a_large_identity_costs_nothing() -> None:
    """No row-by-row steps and no tensor beside it: exact, by the size of the tensor alone."""
    assert program_of((5000, 7000), nn.init.eye_).describe() == "eye(0, 1)"
    got = initialised((500, 700), nn.init.eye_)
    assert torch.equal(got, torch.eye(500, 700))


@pytest.mark.parametrize("shape", [(6, 6), (7, 4), (4, 7), (5, 2, 3), (6, 1, 2, 2), (1, 5), (5, 1)], ids=str)
@pytest.mark.parametrize("gain", [1.0, 0.3])
def test_orthogonal_is_the_definition(shape: tuple[int, ...], gain: float) -> None:
    def write(tensor: torch.Tensor) -> None:
        orthogonal_by_another_name(tensor, gain)

    want = orthogonal(normals(shape), gain)
    assert_bitwise_equal(patterns(initialised(shape, write, torch.float64)), patterns(torch.from_numpy(want)), "fp64")
    fp32 = initialised(shape, write)
    assert_bitwise_equal(patterns(fp32), patterns(torch.from_numpy(want).float()), "fp32")
    for dtype in (torch.bfloat16, torch.float16):
        assert_bitwise_equal(patterns(initialised(shape, write, dtype)), patterns(fp32.to(dtype)), str(dtype))
    assert (
        not torch.equal(initialised(shape, write, seed=SEED + 1), fp32) or shape in ((1, 5), (5, 1)) or max(shape) == 1
    )


def test_orthogonal_is_orthogonal() -> None:
    rows = initialised((20, 3, 11), lambda w: nn.init.orthogonal_(w, 2.0), torch.float64).reshape(20, -1)
    assert (rows @ rows.t() - 4 * torch.eye(20, dtype=torch.float64)).abs().max() < 1e-13


def test_orthogonal_gates_draw_by_their_place_in_the_tensor() -> None:
    """Gates of one weight; a transposed one; columns of it."""

    def gates(w: torch.Tensor) -> None:
        for gate in w.chunk(3):
            nn.init.orthogonal_(gate)

    z = normals((12, 4))
    want = np.concatenate([orthogonal(z[i : i + 4]) for i in (0, 4, 8)])
    assert_bitwise_equal(patterns(initialised((12, 4), gates, torch.float64)), patterns(torch.from_numpy(want)))
    got = initialised((12, 4), lambda w: nn.init.orthogonal_(w.t()), torch.float64)
    assert_bitwise_equal(patterns(got), patterns(torch.from_numpy(orthogonal(z.T).T.copy())))
    columns = initialised((12, 4), lambda w: (w.zero_(), nn.init.orthogonal_(w[::2, 1:3])), torch.float64)
    assert_bitwise_equal(patterns(columns[::2, 1:3]), patterns(torch.from_numpy(orthogonal(z[::2, 1:3]))))
    assert not columns[1::2].any() and not columns[:, 0].any()


def test_orthogonal_is_part_of_a_program() -> None:
    def write(w: torch.Tensor) -> None:
        nn.init.normal_(w)
        nn.init.orthogonal_(w, 2.0)
        w.abs_()

    want = torch.from_numpy(orthogonal(normals((5, 5)), 2.0)).float().abs()
    assert torch.equal(initialised((5, 5), write), want)
    assert program_of((5, 5), write).describe() == "<w>: orthogonal_(gain=2), abs_", "the first fill is dead"
    assert program_of((5, 5), lambda w: (nn.init.orthogonal_(w), w.fill_(1))).describe() == "fill(1)"


def test_orthogonal_of_a_temporary() -> None:
    got = initialised((5, 4), lambda w: w.copy_(nn.init.orthogonal_(torch.empty(5, 4)) * 3), torch.float64)
    want = torch.from_numpy(orthogonal(normals((5, 4), draw=1))).float().mul(3).double()
    assert_bitwise_equal(patterns(got), patterns(want), "the temporary is fp32")


def test_numbers_that_an_orthogonal_matrix_has_used_are_not_used_again() -> None:
    """Its second half is drawn again: what is left of the first call holds all of its numbers."""
    got = initialised((4, 4), lambda w: (nn.init.orthogonal_(w), nn.init.orthogonal_(w[2:])), torch.float64)
    assert_bitwise_equal(patterns(got[:2]), patterns(torch.from_numpy(orthogonal(normals((4, 4), draw=1))[:2])))
    assert_bitwise_equal(patterns(got[2:]), patterns(torch.from_numpy(orthogonal(normals((4, 4))[2:]))))


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_sparse_is_the_definition(sparsity: float, dtype: torch.dtype) -> None:
    shape = (11, 7)
    got = initialised(shape, lambda w: nn.init.sparse_(w, sparsity, 0.05), dtype)
    want = shardinit.normal_(torch.empty(shape, dtype=dtype), 0.05, seed=SEED, tensor_id="w")
    index = np.arange(math.prod(shape))
    words = reference.random_bits(index, dtype="uint64", seed=SEED, tensor_id=tensor_id("w")).reshape(shape)
    for column in range(shape[1]):
        order = sorted(range(shape[0]), key=lambda row: (int(words[row, column]), row))
        want[order[: math.ceil(sparsity * shape[0])], column] = 0
    assert_bitwise_equal(patterns(got), patterns(want))
    assert ((got == 0).sum(0) == math.ceil(sparsity * shape[0])).all()


def test_threads_do_not_count() -> None:
    shape = (150, 140)
    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            results.append(initialised(shape, nn.init.orthogonal_))
            assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_messages_of_torch_stay() -> None:
    for write, shape in [(nn.init.orthogonal_, (3,)), (nn.init.eye_, (3,)), (nn.init.dirac_, (3, 3))]:
        with pytest.raises(ValueError, match="Only tensors with"), shardinit.recording():
            One(shape, write)
