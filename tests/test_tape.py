"""recording(): what it leaves alone, what it redirects, what it answers and what it refuses."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn as nn
from recorded_models import Decoder, Zoo
from torch.nn.init import trunc_normal_ as trunc_normal_by_another_name
from torch.nn.modules import module as nn_module

from torch_shardinit.errors import RecordError
from torch_shardinit.program import Exact, Played
from torch_shardinit.record import record, recording
from torch_shardinit.recording import ATTRIBUTE


class Holder(nn.Module):
    """Holds what its function gives as the buffer `value`."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.register_buffer("value", make())


def played(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    with recording():
        model = Holder(make)
    program = record(model).lookup("value").program
    assert isinstance(program, Played), program
    return program.evaluate(0, lambda name, draw: 0)


def described(make: Callable[[], torch.Tensor]) -> str:
    with recording():
        model = Holder(make)
    return record(model).lookup("value").program.describe()


def this_line(offset: int) -> str:
    import sys

    return f"{__file__}:{sys._getframe(1).f_lineno + offset}"


def test_nothing_is_allocated_and_no_generator_moves() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with recording():
        huge = nn.Linear(1 << 20, 1 << 20)
        model = Zoo()
        torch.randn(3, device="cpu")
        torch.manual_seed(99)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(tensor.is_meta for tensor in [huge.weight, *model.parameters(), *model.buffers()])


def test_hooks_and_modes_are_gone_after_an_exception() -> None:
    hooks = [
        nn_module._global_parameter_registration_hooks,
        nn_module._global_buffer_registration_hooks,
        nn_module._global_module_registration_hooks,
    ]
    before = [dict(one) for one in hooks]
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), recording():
        model = nn.Linear(2, 2)
        torch.rand(2, device="cpu")
        raise ZeroDivisionError
    assert [dict(one) for one in hooks] == before and torch.equal(torch.get_rng_state(), state)
    assert not torch.empty(2).is_meta and ATTRIBUTE not in model.__dict__
    with recording():
        pass


def test_error_nested() -> None:
    with recording():
        model = nn.Linear(2, 2)
        with pytest.raises(RecordError, match="must not be started inside another"), recording():
            pass
        with pytest.raises(RecordError, match="must not be started inside another"):
            record(model, lambda module: None)
    assert record(model).lookup("weight") is not None


def test_the_record_is_invisible() -> None:
    with recording():
        model = Decoder()
    plain = Decoder()
    assert list(model.state_dict()) == list(plain.state_dict()) and repr(model) == repr(plain)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    model.load_state_dict(plain.state_dict(), assign=True)
    assert record(model).entries.keys() == {"cos", "steps", *(name for name, _ in plain.named_parameters())}


def test_the_record_survives_copies_and_leaves_pickles() -> None:
    with recording():
        model = Decoder()
    plan = record(model)
    assert record(copy.deepcopy(model)) == plan and record(copy.copy(model)) == plan
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for loaded in (pickle.loads(pickle.dumps(model)), torch.load(stream, weights_only=False)):
        with pytest.raises(RecordError, match="not built inside recording"):
            record(loaded)


def test_devices() -> None:
    def on_meta(*tensors: torch.Tensor) -> bool:
        return all(tensor.device.type == "meta" for tensor in tensors)

    with recording():
        assert on_meta(torch.empty(3), torch.tensor([1.0]), torch.arange(3))
        assert on_meta(torch.zeros(3, device="cuda"), torch.tensor([1.0], device="cuda:1"))
        assert on_meta(torch.ones(2).to("cuda"), torch.ones(2).cuda(), torch.ones(2).cpu())
        assert torch.zeros(3, device="cpu").device.type == "cpu"
        assert torch.tensor([2.0], device=torch.device("cpu")).tolist() == [2.0]
        assert torch.tensor([]).device.type == "cpu" and torch.empty(0, 3).device.type == "cpu"
        assert on_meta(torch.zeros(3, device="cpu").to("cuda"))
        with torch.device("cuda"):
            assert on_meta(nn.Linear(2, 2).weight)


def test_explicit_cpu_parameters_are_recorded_too() -> None:
    with recording():
        model = nn.Linear(3, 2, device="cpu")
        nn.init.trunc_normal_(model.weight, std=0.5)
    assert not model.weight.is_meta
    plan = record(model)
    assert plan.lookup("weight").program.describe() == "trunc_normal(std=0.5, mean=0, a=-2, b=2)"
    assert plan.lookup("bias").program.describe() == "uniform(a=-0.57735, b=0.57735)"


def test_init_functions_are_caught_under_any_name() -> None:
    def make() -> torch.Tensor:
        return trunc_normal_by_another_name(torch.empty(3, 4), mean=0.5, std=2, a=-1, b=3)

    assert described(make) == "trunc_normal(std=2, mean=0.5, a=-1, b=3)"
    with torch.device("meta"):
        assert trunc_normal_by_another_name(torch.empty(3)).is_meta, "outside a recording they return early as ever"


def test_values_are_answered_by_playing() -> None:
    answers = []

    def make() -> torch.Tensor:
        rates = torch.linspace(0, 0.3, 4)
        answers.append([x.item() for x in rates])
        answers.append(rates.tolist())
        answers.append(bool((rates > 0.2).any()))
        answers.append(rates.mul(2).numpy().tolist())
        answers.append(np.asarray(torch.ones(2)).tolist())
        answers.append(torch.equal(rates, rates.clone()))
        answers.append(int(torch.tensor([3, 1]).argmax()))
        answers.append(torch.nonzero(torch.tensor([0.0, 1.0, 2.0])).tolist())
        return torch.tensor(rates.tolist())

    assert torch.equal(played(make), torch.linspace(0, 0.3, 4))
    rates = torch.linspace(0, 0.3, 4)
    assert answers[0] == answers[1] == rates.tolist()
    assert answers[2:] == [True, rates.mul(2).tolist(), [1.0, 1.0], True, 0, [[1], [2]]]


@pytest.mark.parametrize("device", [None, "cpu"])
def test_error_control_flow_on_random_values(device: str | None) -> None:
    message = r"needs the values.*test_tape\.py:\d+.*depend on random numbers"
    with pytest.raises(RecordError, match=message), recording():
        if torch.randn(3, device=device).sum() > 0:
            pass
    line = this_line(+2)
    with pytest.raises(RecordError, match=re.escape(line)), recording():
        torch.rand(3, device=device).tolist()


def test_error_values_of_unwritten_memory() -> None:
    with pytest.raises(RecordError, match="nothing that was recorded wrote them"), recording():
        torch.empty(3).tolist()


def test_boolean_masks_and_mixed_operands() -> None:
    outside = torch.tensor([1.0, 2.0, 3.0])
    index = torch.tensor([2, 0])

    def make() -> torch.Tensor:
        x = torch.arange(3.0)
        kept = x[x > 0] * 10
        result = torch.cat([kept, x + outside, outside[index], x[index]])
        result[torch.arange(9) == 4] = -1.0
        return result

    assert played(make).tolist() == [10.0, 20.0, 1.0, 3.0, -1.0, 3.0, 1.0, 2.0, 0.0]


def test_outside_tensors_are_taken_when_they_are_used() -> None:
    outside, array = torch.tensor([1.0, 2.0]), np.array([5.0, 6.0])
    with recording():
        first = Holder(lambda: torch.zeros(2).copy_(outside))
        outside.mul_(2)
        second = Holder(lambda: torch.zeros(2).copy_(outside))
        shared = torch.from_numpy(array)
        third = Holder(lambda: shared + 0)
        array[0] = 7.0
        fourth = Holder(lambda: shared + 0)
        model = nn.ModuleList([first, second, third, fourth, Holder(lambda: shared)])
    outside.zero_()
    array[:] = 0
    got = [record(model).lookup(f"{i}.value").program.evaluate(0, lambda name, draw: 0).tolist() for i in range(5)]
    assert got == [[1.0, 2.0], [2.0, 4.0], [5.0, 6.0], [7.0, 6.0], [7.0, 6.0]]


def test_writing_meta_values_to_a_real_tensor() -> None:
    def make() -> torch.Tensor:
        real = torch.zeros(4, device="cpu")
        real[1:3] = torch.arange(2.0) + 1
        assert real.tolist() == [0.0, 1.0, 2.0, 0.0]
        return real

    assert played(make).tolist() == [0.0, 1.0, 2.0, 0.0]


def test_the_default_dtype_of_the_recording_counts() -> None:
    def make() -> torch.Tensor:
        return torch.arange(0, 1, 0.25) + torch.linspace(0, 1, 4)

    torch.set_default_dtype(torch.float64)
    try:
        want = make()
        with recording():
            model = Holder(make)
    finally:
        torch.set_default_dtype(torch.float32)
    got = record(model).lookup("value").program.evaluate(0, lambda name, draw: 0)
    assert got.dtype == torch.float64 and torch.equal(got, want)


def test_error_random_numbers_that_the_stream_does_not_have() -> None:
    cases: list[tuple[Callable[[], torch.Tensor], str]] = [
        (lambda: torch.bernoulli(torch.full((3,), 0.5)), "aten::bernoulli"),
        (lambda: torch.poisson(torch.ones(3)), "aten::poisson"),
        (lambda: torch.randn(3, dtype=torch.complex64), "aten::randn"),
        (lambda: torch.empty(3, dtype=torch.complex64).normal_().abs(), "aten::normal_"),
    ]
    for make, op in cases:
        with recording():
            model = Holder(make)
        with pytest.raises(RecordError, match=rf"value: {op}[.\w]* at .*test_tape\.py:\d+.*not supported yet"):
            record(model)


def test_copies_of_a_tensor_of_the_model_are_computed_from_it() -> None:
    with recording():
        student = nn.Linear(3, 2)
        model = nn.ModuleDict({"student": student, "teacher": copy.deepcopy(student)})
    program = record(model).lookup("teacher.weight").program
    assert isinstance(program, Played) and program.depends_on == ("student.weight",)
    with recording():
        whole = copy.deepcopy(nn.Linear(3, 2))
    assert record(whole).lookup("weight").program.describe() == "uniform(a=-0.57735, b=0.57735)"
    part = model["teacher"]
    with pytest.raises(RecordError, match=r"weight: aten::uniform_ at .*it draws for a tensor outside of this model"):
        record(part)


def test_a_part_has_the_programs_of_the_whole() -> None:
    with recording():
        model = Decoder()
    whole, part = record(model), record(model.layers[1], rename=lambda name: f"layers.1.{name}")
    assert len(part.entries) == 9
    for name, entry in part.entries.items():
        assert entry == whole.lookup(name)


def test_error_sharded_tensors() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        with pytest.raises(RecordError, match=r"on a DTensor at .*only plain tensors can be recorded"), recording():
            DTensor.from_local(torch.ones(3, device="cpu"), mesh, [Replicate()]).mul_(2)
        with pytest.raises(RecordError, match="only plain tensors can be recorded"), recording():
            fully_shard(nn.Linear(3, 3), mesh=mesh)
    finally:
        dist.destroy_process_group()


def test_deep_copies_of_real_tensors_are_seen() -> None:
    def make() -> torch.Tensor:
        return copy.deepcopy(torch.randn(3, device="cpu").cos_())

    with recording():
        model, fine = Holder(make), Holder(lambda: copy.deepcopy(torch.zeros(3, device="cpu")))
    assert record(fine).lookup("value").program.describe() == "fill(0)"
    assert record(model).lookup("value").program.describe() == "<value>: normal(std=1, mean=0), cos_, clone"


def test_arrays_are_read_only() -> None:
    with recording():
        for tensor in (torch.zeros(3), torch.zeros(3, device="cpu")):
            with pytest.raises(ValueError, match="read-only"):
                tensor.numpy()[0] = 1.0
            assert np.array(tensor).flags.writeable


def test_modules_of_two_recordings() -> None:
    with recording():
        trunk = nn.Linear(3, 3)
    with recording():
        head = nn.Linear(3, 2)
        with torch.no_grad():
            trunk.weight.mul_(0.5)
        model = nn.Sequential(trunk, head)
    plan = record(model)
    assert plan.lookup("0.weight").program.describe() == "uniform(a=-0.57735, b=0.57735); mul(0.5)"
    assert isinstance(plan.lookup("0.bias").program, Exact) and isinstance(plan.lookup("1.bias").program, Exact)


def test_two_models_in_one_recording() -> None:
    with recording():
        first, second = nn.Linear(2, 2), Decoder()
    assert record(first).entries.keys() == {"weight", "bias"} and "norm.weight" in record(second).entries
