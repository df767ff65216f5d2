"""What is done with one model: its own constructor, recorded on meta; programs; values, unsharded and on FSDP2 shards
of three ranks; stock torch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn as nn
from fake_world import run_world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch_replay import replayed

import torch_shardinit as shardinit
from torch_shardinit.plan import Entry, Plan
from torch_shardinit.program import Exact, Played, PlayedDraw, Unwritten

SEED = 17
WORLD = 3
MAX_ELEMENTS = 12_000_000  # of parameters: larger models are not swept
Make = Callable[[], nn.Module]
Prepare = Callable[[], Make]  # what need not be recorded: arguments, a look at the size
CLASSES = ("exact", "played", "composite", "unwritten")


@dataclass
class Row:
    """num_elements: of all tensors. classes: how many tensors of each. compared: elements on three ranks. failure: "",
    or what does not hold. not_built: "", or why. stock: "ok", or how the recording differs from stock torch. seconds:
    for all of it."""

    package: str
    model: str
    num_elements: int = 0
    classes: dict[str, int] = field(default_factory=dict)
    compared: int = 0
    failure: str = ""
    not_built: str = ""
    stock: str = ""
    seconds: float = 0.0


class NotBuilt(Exception):
    """The package itself does not build the model with these arguments, or it is too large: no row of the table."""


class Failure(Exception):
    """Something that must hold does not."""


def class_of(entry: Entry) -> str:
    """The class of Plan's table, and "composite" for a played tensor whose draws are no function of one element."""
    if isinstance(entry.program, Played) and any(isinstance(op, PlayedDraw) for op in entry.program.ops):
        return "composite"
    return "unwritten" if entry.kept else entry.program_class


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.contiguous().flatten().view(torch.uint8)


def differing(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> list[str]:
    """The names of tensors that are not the same bytes, dtype and shape."""
    if got.keys() != want.keys():
        raise Failure(f"other tensors: {sorted(got.keys() ^ want.keys())[:4]}")
    found = []
    for name, tensor in got.items():
        other = want[name]
        same = tensor.dtype == other.dtype and tensor.shape == other.shape
        if not same or not torch.equal(as_bytes(tensor), as_bytes(other)):
            found.append(name)
    return found


def units(model: nn.Module) -> list[nn.Module]:
    """The layers of the model's lists that share no module and no parameter with the rest of the model: FSDP2 cannot
    have one parameter in two of its groups."""
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(f"{path}.")
        for parameter in module._parameters.values():
            if parameter is not None:
                paths.setdefault(id(parameter), []).append(f"{path}.")
    chosen: list[str] = []
    layers = []
    for path, module in model.named_modules():
        for name, layer in module.named_children():
            start = f"{path}.{name}." if path else f"{name}."
            listed = isinstance(module, (nn.ModuleList, nn.Sequential))
            if not listed or isinstance(layer, (nn.ModuleList, nn.ModuleDict)) or start.startswith(tuple(chosen)):
                continue
            mine = [*layer.modules(), *layer.parameters()]
            if mine[1:] and all(one.startswith(start) for member in mine for one in paths[id(member)]):
                chosen.append(start)
                layers.append(layer)
    return layers


def shard(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    scalars = {parameter for parameter in model.parameters() if not parameter.dim()}  # FSDP2 takes none
    for unit in units(model):
        fully_shard(unit, mesh=mesh, ignored_params=scalars)
    return fully_shard(model, mesh=mesh, ignored_params=scalars)


def on_a_rank(recorded: nn.Module, whole: nn.Module, keep: list[str]) -> tuple[int, int, list[str]]:
    """(elements of this rank, how many of them are in shards, differing tensors)."""
    ours = shardinit.init_model_(shard(recorded), SEED, keep=[*map(literal, keep)], device="cpu")
    truth = tensors_of(shard(whole))  # real and unsharded before: the framework cuts it
    got, want, count = {}, {}, 0
    for name, tensor in tensors_of(ours).items():
        other = truth[name]
        if isinstance(tensor, DTensor):
            if not isinstance(other, DTensor) or tensor.placements != other.placements:
                raise Failure(f"{name}: not sharded alike")
            tensor, other = tensor.to_local(), other.to_local()
        if name not in keep:
            got[name], want[name] = tensor, other
            count += tensor.numel()
    sharded = sum(p.to_local().numel() for p in ours.parameters() if isinstance(p, DTensor))
    return count, sharded, differing(got, want)


def record_twice(make: Make) -> tuple[nn.Module, nn.Module, Plan]:
    models = []
    for _ in range(2):
        with shardinit.recording():
            models.append(make())
    plans = [shardinit.record(model) for model in models]
    if plans[0] != plans[1]:
        raise Failure(f"two recordings differ: {'; '.join(plans[0].diff(plans[1])[:3])}")
    return models[0], models[1], plans[0]


def eager(make: Make, seed: int) -> dict[str, torch.Tensor]:
    """Stock torch; memory that nothing writes is NaN, or the greatest integer, as deterministic mode has it."""
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    try:
        return tensors_of(make())
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Whether some element is as torch.empty left it in `eager`."""
    if tensor.dtype == torch.bool:
        return bool(tensor.any())
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return bool((tensor == torch.iinfo(tensor.dtype).max).any())


def examine(row: Row, make: Make) -> Row:
    """All of it, noted in `row` as far as it gets. Raises what the recording raises, and Failure."""
    start, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(2)  # the ranks have one
    try:
        recorded, model, plan = record_twice(make)
        row.classes = dict(Counter(class_of(entry) for entry in plan.entries.values()))
        row.num_elements = sum(torch.Size(entry.shape).numel() for entry in plan.entries.values())
        want = eager(make, SEED)
        unwritten = [entry for entry in plan.entries.values() if isinstance(entry.program, Unwritten)]
        keep = [name for entry in unwritten for name in entry.aliases]
        written = [f"{one.name}: {one.program.describe()}" for one in unwritten if not is_unwritten(want[one.name])]
        if written:
            raise Failure(f"{len(written)} tensors are unwritten, but not in stock torch: {'; '.join(written[:4])}")
        row.stock = compare_with_stock(recorded, plan, want, keep)
        shardinit.init_model_(model, SEED, keep=[*map(literal, keep)], device="cpu")
        check_constants(model, plan, want, keep)
        answers = run_world(on_a_rank, WORLD, recorded, model, keep)
        for rank, (count, _, names) in enumerate(answers):
            if names:
                few = names[:4]
                raise Failure(f"rank {rank} of {WORLD}: {len(names)} tensors differ from the unsharded ones: {few}")
            row.compared += count
        if sum(sharded for _, sharded, _ in answers) != sum_of_sharded(recorded):
            raise Failure("the shards of three ranks are not the whole model")
    finally:
        torch.set_num_threads(threads)
        row.seconds = time.perf_counter() - start
    return row


def literal(name: str) -> str:
    """A glob pattern that is this name."""
    return name.replace("[", "[[]").replace("*", "[*]").replace("?", "[?]")


def sum_of_sharded(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.dim())


def check_constants(model: nn.Module, plan: Plan, want: dict[str, torch.Tensor], keep: list[str]) -> None:
    """What is not random is what torch gives."""
    got = tensors_of(model)
    for entry in plan.entries.values():
        program = entry.program
        random = program.is_random if isinstance(program, Exact) else bool(getattr(program, "depends_on", ()))
        if entry.name in keep or random:
            continue
        if differing({entry.name: got[entry.name]}, {entry.name: want[entry.name]}):
            raise Failure(f"{entry.name}: {program.describe()[:80]} does not give torch's values")


def compare_with_stock(recorded: nn.Module, plan: Plan, want: dict[str, torch.Tensor], keep: list[str]) -> str:
    by_tape, by_program = replayed(recorded, plan, SEED)
    rest = {name: tensor for name, tensor in want.items() if name not in keep}
    names = differing({name: tensor for name, tensor in by_tape.items() if name not in keep}, rest)
    if names:
        return f"the tape: {len(names)} of {len(rest)} tensors differ: {names[:3]}"
    names = differing(by_program, {name: rest[name] for name in by_program})
    if names:
        return f"the programs: {len(names)} of {len(by_program)} tensors differ: {names[:3]}"
    return "ok"
