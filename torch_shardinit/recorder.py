"""What the two modes of a recording share: the writer of the tape, what the user asked for, and checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .errors import RecordError
from .tape import Node, OpInfo, Writer, user_line

if TYPE_CHECKING:
    from .other_generators import OtherGenerators


def where() -> str:
    file, line = user_line()
    return f"{file}:{line}"


def flat_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among nested lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from flat_tensors(item)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)(map_tensors(function, item) for item in value)
    return value


def meta_twin(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor with a storage of its own and the geometry of `tensor`."""
    storage = torch.UntypedStorage(tensor.untyped_storage().nbytes(), device="meta")
    twin = torch.empty(0, dtype=tensor.dtype, device="meta")
    return twin.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]


class Recorder:
    """What the two modes share. other_generators: Python's and NumPy's, looked at with each operation."""

    def __init__(self) -> None:
        self.writer = Writer()
        self.explicit_cpu = False  # inside a call that names device="cpu"
        self.literal = False  # inside torch.tensor(...), whose data nobody else holds
        self.has_shared_constants = False
        self.other_generators: OtherGenerators | None = None
        self._plain_types: dict[type, bool] = {torch.Tensor: True, torch.nn.Parameter: True}

    def recorded(self, node: Node) -> None:
        """Called with each node of the tape, as it is made."""
        if self.other_generators is not None:
            self.other_generators.look(node)

    def check_plain(self, tensor: torch.Tensor, info: OpInfo) -> None:
        cls = type(tensor)
        plain = self._plain_types.get(cls)
        if plain is None:
            plain = self._plain_types[cls] = cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        if not plain:
            raise RecordError(
                f"{info.label} on a {cls.__name__} at {where()}: only plain tensors can be recorded. Leave the "
                "recording before the model is sharded (distribute_tensor, fully_shard, ...), or shard it first and "
                "give the init code as record(model, init_fn), which runs on meta stand-ins of the whole tensors."
            )
        if tensor.layout is not torch.strided:
            raise RecordError(
                f"{info.label} at {where()}: only torch.strided tensors can be recorded, got layout {tensor.layout}"
            )
        if not info.is_view and (tensor.is_neg() or tensor.is_conj()):
            raise RecordError(
                f"{info.label} at {where()}: lazily conjugated or negated views cannot be recorded, got one; use "
                "torch.conj_physical or torch.neg"
            )

    def values(self, tensors: list[torch.Tensor], what: str) -> list[torch.Tensor]:
        """The values that tensors have now, as real tensors. RecordError where they are random or unwritten."""
        from .play import values_now

        refs = [self.writer.ref(tensor) for tensor in tensors]
        return values_now(self.writer.tape, refs, self.writer.last_number + 1, f"{what} at {where()}")

    def refuse_random(self, tensor: torch.Tensor, what: str) -> None:
        """Real tensors have values, but those of a recording must not depend on torch's generator."""
        from .play import check_not_random

        ref = self.writer.ref(tensor)
        if self.writer.tape.writers(ref.storage):
            check_not_random(self.writer.tape, [ref], self.writer.last_number + 1, f"{what} at {where()}")

    def listed(self, data: Any, dtype: torch.dtype | None) -> tuple[Any, torch.dtype]:
        """torch.tensor takes the values of the tensors that a list holds, past the dispatcher. So: Python numbers in
        their place, and the dtype that torch makes of them all."""
        what = "torch.tensor of a list of tensors needs their values"

        def value(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type == "meta":
                return self.values([tensor], what)[0]
            self.refuse_random(tensor, what)
            return tensor

        with torch._C.DisableTorchFunction(), _disable_current_modes():
            real = torch.tensor(map_tensors(value, data), dtype=dtype, device="cpu")
        return real.tolist(), real.dtype
