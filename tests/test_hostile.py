"""What a recording must not get wrong in silence: each case once gave other values than the same code on real tensors,
depended on the state of torch, or hid what went wrong behind another error."""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn as nn
from conftest import assert_bitwise_equal, patterns
from recorded_models import Tables, Zoo

import torch_shardinit as shardinit
from torch_shardinit.model import materialise_
from torch_shardinit.program import Exact, Step

P = nn.Parameter


class Holder(nn.Module):
    """Holds what its function returns under the names given there."""

    def __init__(self, make: Callable[[], dict[str, torch.Tensor]]) -> None:
        super().__init__()
        for name, tensor in make().items():
            if isinstance(tensor, P):
                setattr(self, name, tensor)
            else:
                self.register_buffer(name, tensor)


def recorded(make: Callable[[], dict[str, torch.Tensor]]) -> nn.Module:
    with shardinit.recording():
        return Holder(make)


def values(model: nn.Module, seed: int = 3) -> dict[str, torch.Tensor]:
    shardinit.init_model_(model, seed, device="cpu")
    return {name: tensor.detach().clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert_bitwise_equal(patterns(tensor), patterns(want[name]), name)


# ---- the sign of zero ---------------------------------------------------------------------------------------------


def test_minus_zero_is_not_zero() -> None:
    """-0.0 == 0.0, so caches and comparisons of programs must look at bits."""
    for first, second in [(0.0, -0.0), (-0.0, 0.0)]:
        got = values(recorded(lambda a=first, b=second: {"a": torch.full((3,), a), "b": torch.full((3,), b)}))
        assert_same(got, {"a": torch.full((3,), first), "b": torch.full((3,), second)})
    assert Step("fill", (0.0,)) != Step("fill", (-0.0,))
    assert Step("fill", (float("nan"),)) == Step("fill", (float("nan"),))
    plan = shardinit.record(recorded(lambda: {"w": torch.cat([torch.zeros(2), torch.full((2,), -0.0)])}))
    assert_same({"w": plan.fill_("w", torch.ones(4), seed=1)}, {"w": torch.tensor([0.0, 0.0, -0.0, -0.0])})


# ---- random numbers that the stream would give twice, or not at all -----------------------------------------------


def whole_of_a_part() -> dict[str, torch.Tensor]:
    flat = torch.empty(12).normal_()
    return {"a": P(flat[:6]), "b": P(flat[6:].exp())}


def column_of_a_part() -> dict[str, torch.Tensor]:
    flat = torch.randn(3, 4)
    return {"a": P(flat[:, :2]), "b": flat.sum(1)}


def redrawn_part() -> dict[str, torch.Tensor]:
    a = P(torch.randn(4))
    b = a.data.exp()
    a.data[:2].normal_()
    return {"a": a, "b": b}


def mixed_in_place() -> dict[str, torch.Tensor]:
    a = P(torch.empty(4))
    a.data.normal_()
    a.data.cumsum_(0)
    a.data[:1].normal_()
    return {"a": a}


def added_in_place() -> dict[str, torch.Tensor]:
    a = P(torch.empty(4))
    a.data.normal_()
    a.data[2:].add_(a.data[:2])
    a.data[:2].normal_()
    return {"a": a}


def diagonal() -> dict[str, torch.Tensor]:
    a = P(torch.zeros(4, 4))
    a.data.diagonal().normal_()
    return {"a": a}


def normal(draw: int, *shape: int) -> torch.Tensor:
    return shardinit.normal_(torch.empty(shape), seed=3, tensor_id=shardinit.tensor_id("a", draw))


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (whole_of_a_part, lambda z, own: {"a": z[:6], "b": z[6:].exp()}),
        (column_of_a_part, lambda z, own: {"a": z.view(3, 4)[:, :2], "b": z.view(3, 4).sum(1)}),
        (redrawn_part, lambda z, own: {"a": torch.cat([own[:2], z[2:4]]), "b": z[:4].exp()}),
        (mixed_in_place, lambda z, own: {"a": torch.cat([own[:1], z[:4].cumsum(0)[1:]])}),
        (added_in_place, lambda z, own: {"a": torch.cat([own[:2], z[2:4] + z[:2]])}),
        (diagonal, lambda z, own: {"a": torch.diag(z[:4])}),
    ],
)
def test_numbers_that_have_no_one_place_are_temporaries(
    make: Callable[[], dict[str, torch.Tensor]], want: Callable[..., dict[str, torch.Tensor]]
) -> None:
    """They are used twice, once after they were drawn again; or drawn on a view that is no box of a tensor."""
    got, expected = values(recorded(make)), want(normal(1, 12), normal(0, 4))
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert_bitwise_equal(patterns(tensor), patterns(expected[name]), name)


def test_error_complex_random_numbers() -> None:
    with pytest.raises(shardinit.RecordError, match=r"z: aten::randn.* of dtype torch\.complex64"):
        shardinit.record(recorded(lambda: {"z": P(torch.randn(3, dtype=torch.complex64))}))


def test_a_copy_of_a_tensor_that_was_drawn_in_parts() -> None:
    """Equal draws on both sides, and a part that a constant replaced: no number is used twice."""

    def make() -> dict[str, torch.Tensor]:
        a = P(torch.randn(6))
        a.data[:2].uniform_()
        b = a.data.abs()
        a.data[4:].fill_(1.0)
        return {"a": a, "b": b}

    got = values(recorded(make))
    assert torch.equal(got["b"][:4], got["a"][:4].abs()) and (got["a"][4:] == 1).all() and (got["b"][4:] != 1).all()


def test_reads_of_a_part_that_nothing_wrote() -> None:
    """The first view of a storage that a slice meets may be a part of it."""

    def make() -> dict[str, torch.Tensor]:
        flat = torch.empty(12)
        flat[:6].normal_()
        return {"a": P(flat[:6]), "b": flat[6:] * torch.ones(6)}

    with pytest.raises(shardinit.UninitializedError, match=r"b \(mul at .* reads elements that nothing wrote\)"):
        values(recorded(make))


def test_scatters_of_what_nothing_wrote() -> None:
    """index_put_ and its like may leave elements of their target unread, never of their other operands."""

    def make() -> dict[str, torch.Tensor]:
        return {"w": torch.zeros(3, 4).index_copy_(0, torch.tensor([1]), torch.empty(1, 4))}

    with pytest.raises(shardinit.UninitializedError, match=r"w \(index_copy_ at .* reads elements that nothing wrote"):
        values(recorded(make))


@pytest.mark.parametrize("lazy", [lambda c: c.conj(), lambda c: c.conj().imag, lambda c: c.conj().imag * 2])
def test_error_lazily_conjugated_views(lazy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(shardinit.RecordError, match="lazily conjugated or negated view"):
        recorded(lambda: {"c": lazy(torch.polar(torch.ones(3), torch.arange(3.0)))})


def test_constants_are_rounded_where_torch_rounds_them() -> None:
    """Arithmetic in fp32 before a cast to fp64 is not arithmetic in fp64."""

    def make() -> dict[str, torch.Tensor]:
        return {
            "wide": (torch.full((3,), 0.1) * 3).double(),
            "wider": P(torch.empty(3, dtype=torch.float64).copy_(torch.full((3,), 1 / 3).add(0.1))),
            "through_half": (torch.full((3,), 0.1).half() * 3).float(),
            "through_double": (torch.full((3,), 0.1, dtype=torch.float64) * 3 - 0.3).float(),
        }

    assert_same(values(recorded(make)), {name: tensor.detach() for name, tensor in make().items()})


# ---- the state of torch -------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ratio", torch.arange(0, 8, 2) / 7)
        self.register_buffer("rates", 1.0 / (10000 ** (torch.arange(0, 8, 2) / 8)))
        square = torch.arange(16.0).view(4, 4) / 7
        self.register_buffer("product", square @ (square + 1))
        self.register_buffer("scaled", torch.linspace(0, 1, 4)[:, None] * torch.tensor([0.1, 0.3]))
        self.register_buffer("picked", torch.arange(6.0)[torch.tensor([1, 4])])


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


STATES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "default bf16": lambda: default_dtype(torch.bfloat16),
    "default fp64": lambda: default_dtype(torch.float64),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "meta": lambda: torch.device("meta"),
    "cuda": lambda: torch.device("cuda"),
    "default meta": lambda: default_device("meta"),
    "default cuda": lambda: default_device("cuda"),
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("factory", [Mixed, Zoo, Tables])
@pytest.mark.parametrize("state", STATES)
def test_the_state_of_torch_does_not_matter(factory: type[nn.Module], state: str) -> None:
    def record_in(outside: bool, inside: bool) -> nn.Module:
        with STATES[state]() if outside else contextlib.nullcontext(), shardinit.recording():
            with STATES[state]() if inside else contextlib.nullcontext():
                return factory()

    want = values(record_in(False, False))
    model = record_in(False, False)
    with STATES[state]():
        plan = shardinit.record(model)
    materialise_(model, "cpu")
    before = torch.get_default_dtype()
    with STATES[state]():
        plan.apply_(model, 3)
    assert torch.get_default_dtype() is before
    assert_same({name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}, want)
    if state in ("meta", "cuda", "default meta", "default cuda", "inference_mode"):  # the others change what code does
        assert_same(values(record_in(True, False)), want)
        assert_same(values(record_in(False, True)), want)


def test_out_under_a_default_device() -> None:
    with torch.device("meta"), shardinit.recording():
        model = nn.Linear(3, 2)
        with torch.no_grad():
            torch.randn(2, 3, out=model.weight.data)
    assert shardinit.record(model).lookup("weight").program.describe() == "normal(std=1, mean=0)"


# ---- Python data that torch copies past the dispatcher ------------------------------------------------------------


def test_lists_as_indices() -> None:
    def make() -> dict[str, torch.Tensor]:
        table = torch.arange(24.0).view(6, 4)
        table[[0, 2]] = -1.0
        table[[1], [2]] = -2.0
        table[(3, 4), (1, 1)] = -3.0
        table[[True, False, False, False, False, True], 3] = -4.0
        table[:, [0, 1]] = table[:, [1, 0]]
        return {
            "table": table,
            "rows": table[[0, 5]],
            "none": table[[]],
            "new": table.new_tensor([1, 2.5]),
            "narrow": table.new_tensor(data=[1, 2], dtype=torch.float16),
        }

    assert_same(values(recorded(make)), make())


def test_tensors_in_a_list() -> None:
    """torch.tensor reads them past the dispatcher: one dtype for all, nested lists, keywords, real ones among them."""
    outside = torch.tensor(0.1, dtype=torch.float64)

    def make() -> dict[str, torch.Tensor]:
        end = torch.exp(torch.scalar_tensor(-5.0))
        table = torch.arange(4)
        return {
            "same": torch.tensor([(2 / 3 * (1 - end)) ** -2] * 3),
            "wide": torch.tensor([end, outside, 2]),
            "integers": torch.tensor([table[1], table[3], 7]),
            "nested": torch.tensor(data=[[end, 1.0], (end * 2, end)], dtype=torch.bfloat16),
            "new": end.new_tensor([end, 0.5]),
        }

    model = recorded(make)
    assert_same(values(model), make())
    assert {name: tensor.dtype for name, tensor in values(model).items()} == {n: t.dtype for n, t in make().items()}


def test_error_random_tensors_in_a_list() -> None:
    with pytest.raises(shardinit.RecordError, match=r"list of tensors needs their values .*depend on random numbers"):
        recorded(lambda: {"w": torch.tensor([torch.randn(()), torch.tensor(2.0)])})


@pytest.mark.parametrize("std", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5), "taped"])
def test_numbers_of_other_kinds(std: object) -> None:
    def make() -> dict[str, torch.Tensor]:
        value = torch.tensor(0.25) * 2 if std == "taped" else std
        return {"w": P(nn.init.trunc_normal_(torch.empty(3), std=value))}  # type: ignore[arg-type]

    program = shardinit.record(recorded(make)).lookup("w").program
    assert program.describe() == "trunc_normal(std=0.5, mean=0, a=-2, b=2)"


def test_long_chains_are_played() -> None:
    """Neither Python's stack nor the kernels' number of steps nor 2**20 terms is a limit."""

    def make() -> dict[str, torch.Tensor]:
        chain, in_place, tree = torch.ones(3), torch.ones(3), torch.ones(1)
        for _ in range(600):
            chain = chain * 0.999
            in_place *= 0.999
        for _ in range(10):
            tree = torch.cat([tree[:9], tree[:9] * 0.5])
        return {"chain": chain, "in_place": in_place, "tree": tree}

    assert_same(values(recorded(make)), make())

    def many(count: int) -> dict[str, torch.Tensor]:
        w = P(torch.empty(4))
        w.data.normal_()
        for _ in range(count):
            w.data.mul_(0.5).mul_(2.0)
        return {"w": w}

    assert_same(values(recorded(lambda: many(40))), values(recorded(lambda: many(16))))


# ---- several recordings, threads ----------------------------------------------------------------------------------


def test_memory_from_outside_in_two_recordings() -> None:
    shared = torch.arange(3.0)
    first = recorded(lambda: {"x": shared})
    assert_same(values(recorded(lambda: {"x": shared, "y": shared * 2})), {"x": shared, "y": shared * 2})
    shared.fill_(9.0)
    with shardinit.recording():
        both = Holder(lambda: {"y": shared * 2})
        both.first = first
    assert_same(values(both), {"y": torch.full((3,), 18.0), "first.x": torch.full((3,), 9.0)})


def test_a_tensor_of_another_model_brings_its_tape() -> None:
    with shardinit.recording():
        table = nn.Module()
        table.register_buffer("cos", torch.arange(4.0).cos())
    second = recorded(lambda: {"twice": table.cos * 2})
    assert_same(values(second), {"twice": torch.arange(4.0).cos() * 2})


def test_init_code_in_a_second_recording() -> None:
    with shardinit.recording():
        model = nn.Linear(3, 2)
    with shardinit.recording():
        nn.init.ones_(model.weight)
    plan = shardinit.record(model)
    assert plan.lookup("weight").program.describe() == "fill(1)"
    assert plan.lookup("bias").program.describe() == "uniform(a=-0.57735, b=0.57735)"
    shardinit.init_model_(model, 3, device="cpu")
    with pytest.raises(shardinit.RecordError, match=r"Linear\.weight was recorded, then got memory"):
        with shardinit.recording():
            nn.init.zeros_(model.weight)


def test_warning_init_code_after_the_recording() -> None:
    with shardinit.recording():
        model = nn.Linear(3, 2)
    model.requires_grad_(False).to(torch.bfloat16).to(torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shardinit.record(model)
    nn.init.zeros_(model.bias)
    with pytest.warns(UserWarning, match=r"1 tensors were written on meta after recording\(\) had ended \(bias\)"):
        shardinit.record(model)


def test_modules_of_other_threads_are_not_recorded() -> None:
    built, go, done = [], threading.Event(), threading.Event()

    def other() -> None:
        go.wait()
        built.append(copy.deepcopy(nn.Linear(3, 3)))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with shardinit.recording():
        nn.Linear(2, 2)
        go.set()
        done.wait()
    thread.join()
    with pytest.raises(shardinit.RecordError, match="was not built inside recording"):
        shardinit.record(built[0])


def test_recordings_of_two_threads_leave_no_trace() -> None:
    before = nn.Module.__setstate__
    inside, outside = threading.Event(), threading.Event()
    plans = []

    def other() -> None:
        with shardinit.recording():
            model = copy.deepcopy(nn.Linear(3, 3))
            inside.set()
            outside.wait()
        plans.append(shardinit.record(model))

    thread = threading.Thread(target=other)
    with shardinit.recording():
        thread.start()
        inside.wait()
    outside.set()
    thread.join()
    assert nn.Module.__setstate__ is before
    assert isinstance(plans[0].lookup("weight").program, Exact)
