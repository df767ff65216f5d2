"""From a Plan and a model to filled shards: the programs cut to what this rank holds, and one call of the kernels."""

from __future__ import annotations

import fnmatch
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from . import region
from .draws import check_draw
from .errors import UninitializedError
from .eye import without_eye
from .locate import Piece, locate, locate_dtensor
from .locate.dtensor import is_dtensor
from .locate.plain import check_strided
from .native import NativePiece, dtype_name, fill, piece, unary_codes
from .program import Exact, Played, Step, Unwritten
from .stream import resolve_seed, tensor_id
from .targets import Place, check_tensor, place_of

if TYPE_CHECKING:
    from .plan import Entry, Plan

Rename = Callable[[str], str]


def matches(names: Iterable[str], patterns: Sequence[str]) -> bool:
    """Whether a glob pattern fits one of a tensor's names."""
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def check_patterns(keep: object) -> tuple[str, ...]:
    if isinstance(keep, str) or not isinstance(keep, Iterable):
        raise TypeError(f"keep must be a sequence of glob patterns, got {keep!r}")
    patterns = tuple(keep)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"keep must hold glob patterns (str), got {pattern!r}")
    return patterns


@functools.lru_cache(maxsize=4096)
def _draw_of(op: str, args: tuple[float, ...], bits: bytes, dtype: str) -> tuple[float, ...]:
    """A program's parameters, checked; many tensors share few of them. bits: of args, so that the cache tells -0.0
    from 0.0."""
    return check_draw(op, args, dtype, f"{op}_")


class _Filler:
    """Collects the kernels' pieces of many tensors, so that they go down in one call."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.pieces: dict[torch.device, list[NativePiece]] = {}
        self.diagonals: dict[torch.device, list[NativePiece]] = {}  # of eyes: over zeros that are among the pieces
        self.copies: list[Callable[[], None]] = []

    def add_exact(
        self,
        entry: Entry,
        program: Exact,
        view: torch.Tensor,
        boxes: list[tuple[region.Box, torch.Tensor]] | None,
        place: Place,
    ) -> None:
        """One local view. boxes: the view cut to boxes of the tensor; None where all steps are on the whole tensor."""
        if view.numel() == 0:
            return
        if boxes is None:
            self._add_chain(entry, program.steps, view, place, self.pieces)
            return
        for box, part in boxes:
            for inner, chain in program.straight(box):
                start, steps = region.grid_of_box(inner, entry.shape)
                for inside, straight, is_diagonal in without_eye(part[region.rel(inner, box)], inner, chain):
                    place = Place(0, region.row_major_strides(inside.shape)) if is_diagonal else Place(start, steps)
                    pieces = self.diagonals if is_diagonal else self.pieces
                    self._add_chain(entry, straight, inside, place, pieces)

    def _add_chain(
        self,
        entry: Entry,
        chain: tuple[Step, ...],
        view: torch.Tensor,
        place: Place,
        pieces: dict[torch.device, list[NativePiece]],
    ) -> None:
        first, rest = chain[0], chain[1:]
        name = dtype_name(view.dtype)
        assert name is not None
        # Where steps follow, the draw itself is in working precision.
        working = "float32" if rest and name != "float64" else name
        try:
            params = _draw_of(first.op, first.args, first.bits, working)
        except ValueError as error:
            raise ValueError(f"{entry.name}: {error}") from None
        unary = unary_codes([(step.op, step.args) for step in rest]) if rest else ()
        assert isinstance(entry.program, Exact)
        pieces.setdefault(view.device, []).append(
            piece(
                view,
                first.op,
                params,
                seed=self.key,
                tensor_id=tensor_id(entry.program.drawn_as or entry.name),
                start=place.start,
                steps=place.steps,
                unary=unary,
            )
        )

    def run(self) -> None:
        for batch in (self.pieces, self.diagonals):
            for device, pieces in batch.items():
                fill(pieces, device)
        for copy in self.copies:
            copy()


def _has_regions(program: Exact) -> bool:
    return any(step.region is not None or step.op == "eye" for step in program.steps)


def _boxes_of(
    view: torch.Tensor, offset: int | tuple[int, ...], shape: tuple[int, ...]
) -> list[tuple[region.Box, torch.Tensor]]:
    """A local view as boxes of the tensor, each with the part of the view that holds it."""
    if not isinstance(offset, int):
        return [(region.box_at(offset, view.shape), view)]
    parts = []
    position = 0
    for box in region.boxes_of_run(shape, offset, view.numel()):
        size = region.numel(box)
        parts.append((box, view[position : position + size].view([span.size for span in box])))
        position += size
    return parts


def _place_of(offset: int | tuple[int, ...], view: torch.Tensor, shape: tuple[int, ...]) -> Place:
    if isinstance(offset, int):
        return Place(offset, region.row_major_strides(view.shape))
    steps = region.row_major_strides(shape)
    if not any(offset):
        return Place(0, steps)
    return Place(sum(first * step for first, step in zip(offset, steps, strict=True)), steps)


def _part_of(full: torch.Tensor, view: torch.Tensor, offset: int | tuple[int, ...]) -> torch.Tensor:
    """The part of an unsharded tensor that a local view holds."""
    if isinstance(offset, int):
        return full.reshape(-1)[offset : offset + view.numel()]
    return full[tuple(slice(first, first + size) for first, size in zip(offset, view.shape, strict=True))]


def _check_view(what: str, entry: Entry, view: torch.Tensor) -> None:
    """A program's tensor must be one that can be written in place, and by a kernel where the program asks for one."""
    if view.is_meta:
        raise ValueError(f"{what} is on meta and has no memory: pass device= to init_model_, or call to_empty first")
    if entry.dtype.is_floating_point and not (view.is_floating_point() or view.is_complex()):
        raise ValueError(f"{what}: a tensor recorded as {entry.dtype} must be of floating point, got {view.dtype}")
    if isinstance(entry.program, Exact):
        check_tensor(what, view)


def _entries_of(
    plan: Plan, pieces: list[Piece], rename: Rename | None, keep: tuple[str, ...]
) -> list[tuple[Piece, Entry]]:
    """The Plan's entry of each piece that is to be filled; every name is looked at before anything is written."""
    found = []
    local_name: dict[str, str] = {}
    unknown: list[str] = []
    unwritten: dict[str, str] = {}
    used: set[str] = set()
    for one in pieces:
        names = [rename(alias) if rename else alias for alias in one.aliases]
        if keep:
            used.update(pattern for pattern in keep if matches([*one.aliases, *names], [pattern]))
            if matches([*one.aliases, *names], keep):
                continue
        for name in names:
            if local_name.setdefault(name, one.name) != one.name:
                raise ValueError(
                    f"rename must give different tensors different names, got {name} for {local_name[name]} and "
                    f"{one.name}"
                )
        entries = {entry.name: entry for name in names if (entry := plan.lookup(name)) is not None}
        entry = next(iter(entries.values()), None)
        if len(entries) > 1 and 0 not in one.global_shape:
            raise ValueError(
                f"{one.name}: a tensor with several names must be one tensor of the Plan, got {', '.join(names)}, "
                f"which are the Plan's {' and '.join(entries)}"
            )
        if entry is None:
            unknown.append(names[0])
        elif isinstance(entry.program, Unwritten):
            if entry.kept and not one.local.is_meta:
                continue
            if entry.shape and 0 in entry.shape:
                continue
            unwritten[entry.name] = entry.program.describe()
        elif entry.shape != one.global_shape:
            raise ValueError(
                f"{one.name}: the model's shape must be the recorded one, got {list(one.global_shape)}, "
                f"recorded {list(entry.shape)}"
            )
        else:
            found.append((one, entry))
    if unused := [pattern for pattern in keep if pattern not in used]:
        # A stage of a pipeline may well lack what the pattern is for, so this is no error.
        warnings.warn(f"keep: no tensor of this model matches {', '.join(map(repr, unused))}", stacklevel=4)
    if unknown:
        raise ValueError(
            f"the Plan must know every tensor of the model, got {len(unknown)} that it lacks: "
            f"{', '.join(unknown[:20])}. "
            "Give rename= where the model is a part of the recorded one, or keep= to leave them alone."
        )
    if unwritten:
        listed = "; ".join(f"{name} ({reason})" for name, reason in sorted(unwritten.items()))
        raise UninitializedError(
            f"no recorded code initialises {len(unwritten)} tensors: {listed}. Build the model inside recording(), "
            "pass an init_fn that writes them, or name them in keep= to leave them alone."
        )
    return found


def _add(filler: _Filler, entry: Entry, what: str, targets: list[tuple[torch.Tensor, int | tuple[int, ...]]]) -> None:
    """One tensor's local views."""
    for view, _ in targets:
        _check_view(what, entry, view)
    if isinstance(entry.program, Exact):
        for view, offset in targets:
            boxes = _boxes_of(view, offset, entry.shape) if _has_regions(entry.program) else None
            filler.add_exact(entry, entry.program, view, boxes, _place_of(offset, view, entry.shape))
    elif any(view.numel() for view, _ in targets):
        program = entry.program
        assert isinstance(program, Played)
        if program.check_unwritten:  # before anything is written
            try:
                program.evaluate(filler.key, tensor_id)
            except UninitializedError as error:
                raise UninitializedError(f"{entry.name}: {error}") from None

        def copy() -> None:
            # One tensor's slice at a time: evaluated here, cut, and dropped before the next.
            full = program.evaluate(filler.key, tensor_id)
            for view, offset in targets:
                view.copy_(_part_of(full, view, offset))

        filler.copies.append(copy)


def apply_plan(
    plan: Plan, model: torch.nn.Module, seed: int | None, rename: Rename | None, keep: Sequence[str]
) -> None:
    """Fills what this rank holds of the model's tensors; see Plan.apply_."""
    patterns = check_patterns(keep)
    key = resolve_seed(seed, warn_for="apply_")
    located = locate(model)
    targets: dict[str, list[tuple[torch.Tensor, int | tuple[int, ...]]]] = {}
    entries: dict[str, Entry] = {}
    owners: dict[int, torch.Tensor] = {}
    first_name: dict[str, str] = {}
    for one, entry in _entries_of(plan, [*located.pieces, *located.copies], rename, patterns):
        if id(one.owner) in located.refusals:
            raise ValueError(f"{one.name}: {located.refusals[id(one.owner)]}")
        if first_name.setdefault(entry.name, one.name) != one.name and 0 not in entry.shape:
            warnings.warn(
                f"{one.name} and {first_name[entry.name]} were recorded as one tensor and are two in this model (a tie "
                "that Module.to_empty took apart?): they get equal values",
                stacklevel=3,
            )
        entries[entry.name] = entry
        targets.setdefault(entry.name, []).append((one.local, one.offset))
        owners[id(one.owner)] = one.owner
    filler = _Filler(key)
    with torch.no_grad():
        for name, entry in entries.items():
            _add(filler, entry, name, targets[name])
        filler.run()
        for padding in located.padding:
            padding.zero_()
    torch.autograd.graph.increment_version([owner for owner in owners.values() if not owner.is_inference()])


def fill_named(
    plan: Plan, name: str, tensor: torch.Tensor, offset: int | tuple[int, ...] | None, seed: int | None
) -> torch.Tensor:
    """Fills one tensor or shard with a recorded tensor's values; see Plan.fill_."""
    entry = plan.lookup(name)
    if entry is None:
        raise ValueError(f"fill_: the Plan must know the tensor, got {name!r}, which it lacks")
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"fill_: tensor must be a torch.Tensor, got {type(tensor).__name__}")
    if isinstance(entry.program, Unwritten) and 0 not in entry.shape:
        raise UninitializedError(f"fill_: no recorded code initialises {entry.name} ({entry.program.describe()})")
    key = resolve_seed(seed, warn_for="fill_")
    view = tensor
    if is_dtensor(tensor):
        if offset is not None:
            raise ValueError("fill_: a DTensor knows its place; offset must be left out")
        if tuple(tensor.shape) != entry.shape:
            raise ValueError(
                f"fill_: {name}: a DTensor's global shape must be the recorded one, {list(entry.shape)}, got "
                f"{list(tensor.shape)}"
            )
        located = locate_dtensor(tensor, f"fill_: {name}")  # type: ignore[arg-type]
        if located is None:
            return tensor  # this rank is not in the DTensor's mesh and holds nothing of it
        view, _, offset = located
    view = view.detach()
    check_strided(view, f"fill_: {name}")
    corner = (0,) * len(entry.shape) if offset is None else offset
    if offset is None and tuple(view.shape) != entry.shape:
        raise ValueError(
            f"fill_: {name}: without an offset the tensor must be the whole, {list(entry.shape)}, got "
            f"{list(view.shape)}; say where a shard begins"
        )
    place_of("fill_", tuple(view.shape), corner, entry.shape)
    if isinstance(corner, int):
        if view.dim() != 1 and not view.is_contiguous():
            raise ValueError(
                f"fill_: {name}: a run of elements must be 1-D or contiguous, got shape {list(view.shape)} with "
                f"strides {view.stride()}; give its offset as coordinates"
            )
        view = view.view(-1)  # a run, whatever its shape
    filler = _Filler(key)
    with torch.no_grad():
        _add(filler, entry, f"fill_: {entry.name}", [(view, corner if isinstance(corner, int) else tuple(corner))])
        filler.run()
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
    return tensor
