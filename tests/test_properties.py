"""What must hold of the values of any model, over the zoo: the distributions, bounds and constants that init code
prescribes; other layers' bits when one is inserted or removed; no two tensors alike, and none the same for two seeds.

Statistics are those of fixed seeds. Each bound is six standard errors of its mean or variance (a false alarm in 1e-8 of
the streams that one could have chosen), and a test looks at some hundreds of them."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn as nn
from zoo import MODELS

import torch_shardinit as shardinit
from torch_shardinit import region as rg
from torch_shardinit.plan import Entry, Plan
from torch_shardinit.program import RANDOM, Exact, Step

SEED = 41
NUM_VALUES = 4000  # for each statistic, over as many seeds as that takes
MAX_SEEDS = 500
NUM_ERRORS = 6.0
DRAWS = frozenset({"uniform", "normal", "trunc_normal"})
AFFINE = frozenset({"add", "sub", "mul", "div", "neg"})
DEPTHS = ("GPT2", "Llama", "RWKV")  # those whose constructors take a number of layers


@functools.cache
def plan_of(name: str, **options: int) -> Plan:
    with shardinit.recording():
        model = MODELS[name](**options)
    return shardinit.record(model)


def values_of(plan: Plan, entry: Entry, seed: int = SEED) -> torch.Tensor:
    return plan.fill_(entry.name, torch.empty(entry.shape, dtype=entry.dtype), seed=seed)


def is_random(entry: Entry) -> bool:
    program = entry.program
    return program.is_random if isinstance(program, Exact) else bool(program.depends_on)  # type: ignore[union-attr]


def normal_density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi) if math.isfinite(x) else 0.0


def normal_below(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def moments(step: Step) -> tuple[float, float, float, float]:
    """(mean, standard deviation, least, greatest value) of a draw."""
    if step.op == "uniform":
        a, b = step.args
        return (a + b) / 2, (b - a) / math.sqrt(12), a, b
    std, mean, *ends = step.args
    if not ends:
        return mean, std, -math.inf, math.inf
    low, high = ((end - mean) / std for end in ends)
    mass = normal_below(high) - normal_below(low)
    first = (normal_density(low) - normal_density(high)) / mass
    second = 1 + (_times(low) - _times(high)) / mass
    return mean + std * first, std * math.sqrt(second - first * first), *ends


def _times(x: float) -> float:
    return x * normal_density(x) if math.isfinite(x) else 0.0


def stepped(values: torch.Tensor, chain: Sequence[Step]) -> torch.Tensor:
    """The steps after a draw, in the precision of `values`."""
    for step in chain:
        values = values.clamp(*step.args) if step.op == "clamp" else getattr(values, step.op)(*step.args)
    return values


def check_moments(values: torch.Tensor, draw: Step, chain: Sequence[Step], what: str) -> None:
    mean, std, *_ = moments(draw)
    ends = stepped(torch.tensor([mean - std, mean + std], dtype=torch.float64), chain)
    mean, std = float(ends.mean()), abs(float(ends[1] - ends[0])) / 2
    count = values.numel()
    centered = values.double() - mean
    assert abs(float(centered.mean())) <= NUM_ERRORS * std / math.sqrt(count) + 1e-12, f"{what}: mean"
    fourth = 3.0 if draw.op != "uniform" else 1.8  # of a standard variable; a truncated normal's is less than 3
    error = NUM_ERRORS * math.sqrt((fourth - 1) / count)
    rounding = torch.finfo(values.dtype).eps
    assert abs(float(centered.square().mean()) / (std * std) - 1) <= error + rounding, f"{what}: standard deviation"


def check_bounds(values: torch.Tensor, draw: Step, chain: Sequence[Step], what: str) -> None:
    """Rounding keeps order, so the rounded ends are ends."""
    *_, low, high = moments(draw)
    work = torch.float64 if values.dtype == torch.float64 else torch.float32
    ends = stepped(torch.tensor([low, high], dtype=torch.float64).to(work), chain).to(values.dtype)
    assert bool((values >= ends.min()).all()) and bool((values <= ends.max()).all()), f"{what}: bounds"


def check_prescribed(plan: Plan, entry: Entry) -> dict[str, int]:
    """Every box of the tensor against the steps that make it; how many boxes of each operation."""
    assert isinstance(entry.program, Exact)
    boxes = entry.program.straight(rg.full_box(entry.shape))
    least = min((rg.numel(box) for box, _ in boxes), default=1)
    num_seeds = min(MAX_SEEDS, math.ceil(NUM_VALUES / least)) if entry.program.is_random else 1
    of_seeds = torch.stack([values_of(plan, entry, SEED + number) for number in range(num_seeds)])
    seen: dict[str, int] = {}
    for box, (first, *chain) in boxes:
        values = of_seeds[(slice(None), *rg.slices(box))]
        what = f"{entry.name} {first} on {box}"
        seen[first.op] = seen.get(first.op, 0) + 1
        if first.op == "fill":
            work = torch.float64 if entry.dtype == torch.float64 else torch.float32
            constant = stepped(torch.tensor(first.args[0], dtype=torch.float64).to(work), chain).to(entry.dtype)
            assert bool((values == constant).all()), what
        elif first.op in DRAWS:
            check_bounds(values, first, chain, what)
            if all(step.op in AFFINE for step in chain):
                check_moments(values, first, chain, what)
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_values_are_as_prescribed(name: str) -> None:
    plan = plan_of(name)
    exact = [entry for entry in plan.entries.values() if isinstance(entry.program, Exact)]
    assert all(check_prescribed(plan, entry) for entry in exact if torch.Size(entry.shape).numel())


def test_the_zoo_has_every_kind_of_prescription() -> None:
    """So that the test above is about something: each distribution, and rows of zeros in random tensors."""
    operations: set[str] = set()
    zero_rows = []
    for name in MODELS:
        for entry in plan_of(name).entries.values():
            if isinstance(entry.program, Exact):
                operations |= {step.op for step in entry.program.steps}
                if entry.program.is_random and any(
                    step.op == "fill" and step.args == (0.0,) and step.region is not None
                    for step in entry.program.steps
                ):
                    zero_rows.append(f"{name}.{entry.name}")
    assert {*DRAWS, "fill", "mul"} <= operations
    assert zero_rows


def test_a_wrong_prescription_is_seen() -> None:
    with shardinit.recording():
        model = nn.Linear(40, 50)
    plan = shardinit.record(model)
    values = values_of(plan, plan.entries["weight"])
    bound = 1 / math.sqrt(40)
    check_moments(values, Step("uniform", (-bound, bound)), (), "")
    check_bounds(values, Step("uniform", (-bound, bound)), (), "")
    with pytest.raises(AssertionError, match="standard deviation"):
        check_moments(values, Step("uniform", (-1.2 * bound, 1.2 * bound)), (), "")
    with pytest.raises(AssertionError, match="mean"):
        check_moments(values, Step("uniform", (-0.8 * bound, 1.2 * bound)), (), "")
    with pytest.raises(AssertionError, match="bounds"):
        check_bounds(values, Step("uniform", (-0.9 * bound, 0.9 * bound)), (), "")


def gram(matrix: torch.Tensor) -> torch.Tensor:
    matrix = matrix.double()
    return matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix


def assert_orthogonal(matrix: torch.Tensor, gain: float) -> None:
    product = gram(matrix.flatten(1))
    eps = torch.finfo(matrix.dtype).eps
    assert torch.allclose(product, gain * gain * torch.eye(len(product), dtype=torch.float64), rtol=0, atol=4 * eps)


def test_orthogonal_matrices_are_orthogonal() -> None:
    def value(model: str, name: str) -> torch.Tensor:
        entry = plan_of(model).lookup(name)
        assert entry is not None
        return values_of(plan_of(model), entry)

    for layer in range(3):
        assert_orthogonal(value("RWKV", f"layers.{layer}.key.weight"), 0.1)
    for layer in range(2):
        assert_orthogonal(value("OrthogonalLSTM", f"lstm.weight_hh_l{layer}"), 1.0)
    for reverse in ("", "_reverse"):
        for kind in ("ih", "hh"):
            for gate in value("OrthogonalLSTM", f"gru.weight_{kind}_l0{reverse}").chunk(3):
                assert_orthogonal(gate, math.sqrt(2))
    assert_orthogonal(value("CastAfterInit", "layers.1.weight"), 1.0)
    with pytest.raises(AssertionError):
        assert_orthogonal(value("OrthogonalLSTM", "lstm.weight_ih_l0"), 1.0)


def test_sparse_columns_have_their_zeros() -> None:
    plan = plan_of("Sparse")
    values = values_of(plan, plan.entries["reservoir.weight"])
    assert (values == 0).sum(0).tolist() == [math.ceil(0.4 * 8)] * 8


def test_norms_are_those_of_their_weights() -> None:
    with shardinit.recording():
        model = MODELS["WeightNorms"]()
    shardinit.init_model_(model, SEED, device="cpu")
    state = {name: tensor.detach() for name, tensor in model.named_parameters()}
    assert torch.allclose(state["g"], state["old.weight_v"].norm(dim=1), rtol=1e-6)
    weight = state["new.parametrizations.weight.original1"]
    assert torch.allclose(
        state["new.parametrizations.weight.original0"].flatten(), weight.flatten(1).norm(dim=1), rtol=1e-6
    )


def all_values(plan: Plan, seed: int = SEED) -> dict[str, torch.Tensor]:
    return {name: values_of(plan, entry, seed) for name, entry in plan.entries.items()}


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.equal(one.flatten().view(torch.uint8), two.flatten().view(torch.uint8))


@pytest.mark.parametrize("name", MODELS)
def test_modules_added_before_and_after_leave_the_others_alone(name: str) -> None:
    """What else the constructor draws, first, in the middle of a list and last, changes no bit."""
    before = all_values(plan_of(name))
    with shardinit.recording():
        nn.init.normal_(torch.empty(7))  # thrown away
        first = nn.Linear(3, 5)
        model = MODELS[name]()
        model.added_first, model.added_last = first, nn.LSTM(2, 3)
        for module in list(model.modules()):
            if isinstance(module, nn.ModuleList):
                module.append(nn.Linear(2, 2))
    after = all_values(shardinit.record(model))
    assert after.keys() > before.keys()
    assert all(same_bits(after[key], tensor) for key, tensor in before.items())


@pytest.mark.parametrize("name", MODELS)
def test_modules_removed_leave_the_others_alone(name: str) -> None:
    """The last of each list, and every child but one by one, where what is left is not computed from it."""
    before = all_values(plan_of(name))
    with shardinit.recording():
        whole = MODELS[name]()
    checked = 0
    for child in [key for key, _ in whole.named_children()]:
        model = copy.copy(whole)
        model._modules = {key: module for key, module in whole._modules.items() if key != child}
        try:
            after = all_values(shardinit.record(model))
        except shardinit.RecordError as error:
            # A part of a model that draws under a name of the removed part is an error, never another value.
            assert "outside of this model" in str(error)
            continue
        gone = before.keys() - after.keys()
        assert all(key.startswith(f"{child}.") for key in gone)
        assert all(same_bits(after[key], before[key]) for key in after)
        checked += 1
    assert checked or not list(whole.children())


@pytest.mark.parametrize("name", DEPTHS)
def test_another_number_of_layers_changes_only_what_the_code_prescribes_anew(name: str) -> None:
    three, five = plan_of(name, layers=3), plan_of(name, layers=5)
    assert len(five.entries) > len(three.entries)
    same = [key for key, entry in three.entries.items() if five.entries[key].program == entry.program]
    others = three.entries.keys() - same
    random = [key for key in same if is_random(three.entries[key])]
    assert random and all(key.endswith(("c_proj.weight", "time_mix", "time_decay")) for key in others)
    for key in same:
        assert same_bits(values_of(three, three.entries[key]), values_of(five, five.entries[key])), key


@pytest.mark.parametrize("name", MODELS)
def test_two_seeds_differ_in_every_random_tensor(name: str) -> None:
    plan = plan_of(name)
    one, two = all_values(plan), all_values(plan, SEED + 1)
    for key, entry in plan.entries.items():
        assert same_bits(one[key], two[key]) != is_random(entry), key


def random_part(entry: Entry, values: torch.Tensor) -> torch.Tensor:
    """The elements that a draw made, each with an index of its own."""
    if not isinstance(entry.program, Exact):
        return values
    parts = [
        values[rg.slices(box)].flatten()
        for box, (first, *_) in entry.program.straight(rg.full_box(entry.shape))
        if first.op in RANDOM
    ]
    return torch.cat(parts)


def computed_from(entry: Entry) -> tuple[str, ...]:
    return () if isinstance(entry.program, Exact) else entry.program.depends_on  # type: ignore[union-attr]


@pytest.mark.parametrize("name", MODELS)
def test_no_two_tensors_of_one_shape_are_alike(name: str) -> None:
    """Elements at the same place are independent draws, so that equal ones are rare; but for copies and masks."""
    plan = plan_of(name)
    by_shape: dict[object, list[tuple[str, torch.Tensor]]] = {}
    for key, entry in plan.entries.items():
        copied = isinstance(entry.program, Exact) and entry.program.drawn_as is not None
        if is_random(entry) and not copied and entry.dtype in (torch.float32, torch.float64):
            values = random_part(entry, values_of(plan, entry))
            by_shape.setdefault((entry.shape, len(values)), []).append((key, values))
    for same in by_shape.values():
        for position, (key, values) in enumerate(same):
            for other, others in same[:position]:
                if other in computed_from(plan.entries[key]) or key in computed_from(plan.entries[other]):
                    continue
                equal, size = int((values == others).sum()), values.numel()
                assert equal <= size // 8, f"{key} and {other}: {equal} of {size} elements are equal"
