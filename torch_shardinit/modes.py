"""The two torch modes of a recording.

DispatchMode sees every operation as an aten overload on plain tensors and writes the tape. FunctionMode sees what the
user typed, which the dispatcher does not tell: an explicit device, tolist() on meta, and the `is_meta` test at which
some torch.nn.init functions return early.

Factories give meta tensors, so nothing is allocated. An explicit device="cpu" and empty tensors are left real (model
code probes them for the default device); explicit other devices become meta. Real tensors from outside are copied into
the tape when they are first used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import numpy as np
import torch
import torch.nn.init as init
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .errors import RecordError
from .program import Ref
from .recorder import Recorder, flat_tensors, map_tensors, meta_twin, where
from .tape import InitFunctionInfo, OpInfo, is_internal

_META = torch.device("meta")
_DEFAULT = torch.device("cpu")  # this object: no device was named
_INDEX_DTYPES = {"b": torch.bool, "i": torch.int64, "f": torch.int64}  # f: an empty list
# Frames of these are recognised at their is_meta test, whatever name the user imported them by.
_INIT_FUNCTIONS: dict[CodeType, InitFunctionInfo] = {
    init._no_grad_trunc_normal_.__code__: InitFunctionInfo("trunc_normal_"),
    init.orthogonal_.__code__: InitFunctionInfo("orthogonal_"),
    init.sparse_.__code__: InitFunctionInfo("sparse_"),
    init.dirac_.__code__: InitFunctionInfo("dirac_"),
}
_LAZY = {
    cls.__new__.__code__  # type: ignore[attr-defined]
    for cls in (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)
}
# Operators that turn tensors into Python values.
_TELLING = frozenset({"_local_scalar_dense", "equal", "is_nonzero", "allclose"})


class DispatchMode(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder, writer = self.recorder, self.recorder.writer
        info = writer.info(func)
        tensors = list(flat_tensors(args))
        if kwargs:
            tensors += flat_tensors(tuple(kwargs.values()))
        for tensor in tensors:
            recorder.check_plain(tensor, info)
        if info.name == "lift_fresh":
            return self._lift(func(*args, **kwargs))
        if info.is_composite:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if info.is_view:
            result = func(*args, **kwargs)
            if info.name == "resize_":
                writer.resized(result)
            return result
        if not tensors:
            result, kwargs = self._factory(func, info, args, kwargs)
            return self._tape(info, args, kwargs, [], result)
        real = [tensor for tensor in tensors if tensor.device.type != "meta"]
        for tensor in real:
            writer.capture(tensor)
        if recorder.has_shared_constants:
            for tensor in tensors:
                writer.recheck(writer.number_of(tensor.untyped_storage()))
        has_meta = len(real) < len(tensors)
        if info.name in _TELLING:
            return self._tell(func, info, args, kwargs, tensors)
        device = kwargs.get("device")
        if device is not None and device.type != "meta":
            copies = info.name == "_to_copy"
            if (has_meta and (copies or not recorder.explicit_cpu)) or device.type != "cpu":
                kwargs = self._on_meta(kwargs)
        if has_meta and real:
            if any(tensor.device.type != "meta" for tensor in self._mutated(info, args, kwargs)):
                result = self._run_on_values(func, info, args, kwargs)
            else:

                def to_meta(t: torch.Tensor) -> torch.Tensor:
                    return t if t.device.type == "meta" else meta_twin(t)

                meta_args, meta_kwargs = map_tensors(to_meta, args), _map_kwargs(to_meta, kwargs)
                result = self._run_on_meta(func, info, meta_args, meta_kwargs, args, kwargs)
        elif has_meta:
            result = self._run_on_meta(func, info, args, kwargs, args, kwargs)
        else:
            result = func(*args, **kwargs)
        return self._tape(info, args, kwargs, tensors, result)

    @staticmethod
    def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
        kwargs = {**kwargs, "device": _META}
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return kwargs

    def _lift(self, real: torch.Tensor) -> torch.Tensor:
        """torch.tensor([...]) and torch.from_numpy: a constant of the tape, meta from here on."""
        recorder, writer = self.recorder, self.recorder.writer
        if recorder.explicit_cpu or real.numel() == 0 or real.device.type == "meta":
            return real
        twin = meta_twin(real)
        storage = real.untyped_storage()
        shared = None if recorder.literal or storage.device.type != "cpu" else storage
        recorder.has_shared_constants |= shared is not None
        writer.set_constant(writer.number_of(twin.untyped_storage()), storage, shared=shared)
        return twin

    def _factory(
        self, func: Any, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        device = kwargs.get("device")
        if not info.has_device or self.recorder.explicit_cpu or (device is not None and device.type == "meta"):
            result = func(*args, **kwargs)
        else:
            meta_kwargs = self._on_meta(kwargs)
            result = func(*args, **meta_kwargs)
            if isinstance(result, torch.Tensor) and result.numel() == 0:
                return func(*args, **{**kwargs, "device": torch.device("cpu")}), kwargs
            kwargs = meta_kwargs
        if info.has_dtype and kwargs.get("dtype") is None and isinstance(result, torch.Tensor):
            # The default dtype may be another one when this is played.
            kwargs = {**kwargs, "dtype": result.dtype}
        return result, kwargs

    def _run_on_meta(
        self,
        func: Any,
        info: OpInfo,
        meta_args: tuple[Any, ...],
        meta_kwargs: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        try:
            return func(*meta_args, **meta_kwargs)
        except RuntimeError as error:
            # The shape of the result depends on values (nonzero, boolean masks): play them.
            if not isinstance(error, NotImplementedError) and "meta" not in str(error).lower():
                raise
            if info.mutable:
                raise RecordError(f"{info.label} at {where()} cannot run on meta tensors: {error}") from error
            try:
                result = self._run_on_values(func, info, args, kwargs)
            except RecordError as refusal:
                raise refusal from error
            writer = self.recorder.writer

            def known(real: torch.Tensor) -> torch.Tensor:
                real = real.clone()
                twin = meta_twin(real)
                writer.set_constant(writer.number_of(twin.untyped_storage()), real.untyped_storage())
                return twin

            return map_tensors(known, result)

    def _run_on_values(self, func: Any, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        what = f"{info.label} needs the values of a tensor"

        def value(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if tensor.device.type != "meta" else self.recorder.values([tensor], what)[0]

        kwargs = _map_kwargs(value, kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        return func(*map_tensors(value, args), **kwargs)

    def _tell(
        self, func: Any, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        for tensor in tensors:
            if tensor.device.type != "meta":
                self.recorder.refuse_random(tensor, f"{info.label} needs the values of a tensor")
        return self._run_on_values(func, info, args, kwargs)

    @staticmethod
    def _mutated(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for position, name in info.mutable:
            if position is not None and position < len(args):
                found += flat_tensors(args[position])
            elif name in kwargs:
                found += flat_tensors(kwargs[name])
        return found

    def _tape(
        self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor], result: Any
    ) -> Any:
        ref = self.recorder.writer.ref
        mutated = self._mutated(info, args, kwargs) if info.mutable else []
        results = list(flat_tensors(result))
        known = {tensor.untyped_storage()._cdata for tensor in tensors}
        fresh = tuple(
            (index, ref(tensor))
            for index, tensor in enumerate(results)
            if tensor.layout is torch.strided and tensor.untyped_storage()._cdata not in known
        )
        if not (mutated or fresh):
            return result
        if info.name == "copy_" and ref(tensors[0]) == ref(tensors[1]):
            return result  # `w[a:b] *= 2` ends with a copy of the slice to itself
        skipped = {id(tensor) for tensor in mutated} if info.overwrites else ()
        reads = tuple(ref(tensor) for tensor in tensors if id(tensor) not in skipped)
        writes = tuple(ref(tensor) for tensor in mutated)
        if mutated and info.overwrites:  # out= may have been resized
            for tensor in mutated:
                self.recorder.writer.resized(tensor)
        if kwargs:
            kwargs = {key: map_tensors(ref, value) for key, value in kwargs.items() if key != "generator"}
        self.recorder.recorded(self.recorder.writer.add(info, map_tensors(ref, args), kwargs, reads, writes, fresh))
        return result


def _map_kwargs(function: Callable[[torch.Tensor], Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: map_tensors(function, value) for key, value in kwargs.items()}


class FunctionMode(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CONSTRUCTORS:
            kwargs = _with_default_device(args, kwargs or {})
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(self.recorder, func, args, kwargs or {})
        if not kwargs:
            return func(*args)
        if kwargs.get("device") is not None and kwargs["device"] is not _DEFAULT:
            return _with_device(self.recorder, func, args, kwargs)
        return func(*args, **kwargs)


def _with_default_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A default device that was set outside (set_default_device, `with torch.device("meta")`) would be put in below
    this mode, where data given in Python would be lost: so the ordinary one is put in here."""
    if kwargs.get("device") is not None or any(isinstance(value, torch.Tensor) for value in args):
        return kwargs
    out = kwargs.get("out")
    return {**kwargs, "device": _DEFAULT if out is None else out.device}


def _is_cpu(device: Any) -> bool:
    return not isinstance(device, int) and torch.device(device).type == "cpu"


def _with_device(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device = kwargs.get("device")
    if device is None or device is _DEFAULT:
        return func(*args, **kwargs)
    if not _is_cpu(device):
        return func(*args, **{**kwargs, "device": _META})
    before, recorder.explicit_cpu = recorder.explicit_cpu, True
    try:
        return func(*args, **kwargs)
    finally:
        recorder.explicit_cpu = before


def _empty(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A lazy parameter begins as an empty tensor, and gets its memory later where that is: not on the CPU."""
    if args == (0,) and sys._getframe(2).f_code in _LAZY:
        kwargs = {**kwargs, "device": _META}
    return _with_device(recorder, func, args, kwargs)


def _literal(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    data, *rest = args or (kwargs.get("data"),)
    if isinstance(data, (list, tuple)) and any(True for _ in flat_tensors(data)):
        data, dtype = recorder.listed(data, kwargs.get("dtype"))
        args, kwargs = (data, *rest), {**kwargs, "dtype": dtype}
        kwargs.pop("data", None)
    before, recorder.literal = recorder.literal, True
    try:
        if kwargs.get("device") is not None and not _is_cpu(kwargs["device"]):
            # On another device torch copies the data there itself, past the dispatcher.
            kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        return _with_device(recorder, func, args, kwargs)
    finally:
        recorder.literal = before


def _indexed(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch copies an index that is a list straight to the tensor's device, past the dispatcher."""
    tensor, index, *rest = args
    index = tuple(map(_taped_list, index)) if isinstance(index, tuple) else _taped_list(index)
    return func(tensor, index, *rest, **kwargs)


def _taped_list(index: Any) -> Any:
    if not isinstance(index, (list, tuple, range)):
        return index
    found = np.asarray(index) if all(isinstance(item, (int, list, tuple)) for item in index) else None
    return torch.tensor(found.tolist(), dtype=_INDEX_DTYPES[found.dtype.kind]) if found is not None else index


def _new_tensor(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tensor.new_tensor copies Python data to the tensor's device in the same way."""
    tensor, *rest = args
    with torch._C.DisableTorchFunction():
        if tensor.device.type != "meta":
            return func(*args, **kwargs)
        kwargs = {"dtype": tensor.dtype, **{key: value for key, value in kwargs.items() if value is not None}}
    return _literal(recorder, torch.tensor, (*rest, *([kwargs.pop("data")] if "data" in kwargs else ())), kwargs)


def _to(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tensor.to with a device other than the CPU asks for the driver before anything is dispatched."""
    if len(args) > 1 and isinstance(args[1], (str, torch.device, int)) and not _is_cpu(args[1]):
        args = (args[0], _META, *args[2:])
    if kwargs.get("device") is not None and not _is_cpu(kwargs["device"]):
        kwargs = {**kwargs, "device": _META}
    return func(*args, **kwargs)


def _cuda(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return torch.Tensor.to(args[0], _META)


def _deepcopy(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """copy.deepcopy of a real tensor copies its storage past the dispatcher: here it is a clone."""
    tensor, memo = args
    with torch._C.DisableTorchFunction():
        plain = type(tensor) is torch.Tensor and tensor.device.type != "meta" and tensor.layout is torch.strided
    if not plain or id(tensor) in memo or kwargs:
        return func(*args, **kwargs)
    memo[id(tensor)] = copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return copied


def _out_of_torch(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """tolist, numpy and __array__; arrays are read-only."""
    tensor, rest = args[0], args[1:]
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        what = f"Tensor.{func.__name__}() needs the values of a tensor"
        if tensor.device.type == "meta":
            tensor = recorder.values([tensor], what)[0]
        else:
            recorder.refuse_random(tensor, what)
        result = func(tensor, *rest, **kwargs)
        if hasattr(result, "setflags"):
            result.setflags(write=False)  # the tape would not see what is written there
        return result


def _is_meta(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_name in ("__torch_function__", "handle_torch_function"):
        frame = frame.f_back
    info = _INIT_FUNCTIONS.get(frame.f_code) if frame is not None else None
    with torch._C.DisableTorchFunction():
        tensor = args[0]
        if info is None:
            # On one process there is no such tensor, and init code that asks must do what it does there.
            return tensor.is_meta and (frame is None or is_internal(frame.f_code))
        recorder.check_plain(tensor, info)
        if tensor.device.type != "meta":
            with _disable_current_modes():
                recorder.writer.capture(tensor)
        numbers = {}
        for key, value in frame.f_locals.items():
            if isinstance(value, torch.Tensor) and value is not tensor and not value.dim():
                what = f"torch.nn.init.{info.name} needs the value of {key}"
                value = value if value.device.type != "meta" else recorder.values([value], what)[0]
                value = float(value)
            if isinstance(value, np.floating):
                value = float(value)
            if isinstance(value, (int, float, str)) and not isinstance(value, bool):
                numbers[key] = value
        ref: Ref = recorder.writer.ref(tensor)
        if tensor.numel():
            recorder.recorded(recorder.writer.add(info, (ref,), numbers, (), (ref,), ()))
        return True  # "nothing to do on meta": the function returns


_CONSTRUCTORS = frozenset(_device_constructors())
_HANDLERS: dict[Any, Callable[[Recorder, Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    torch.Tensor.is_meta.__get__: _is_meta,  # type: ignore[attr-defined]
    torch.tensor: _literal,
    torch.empty: _empty,
    torch.Tensor.new_tensor: _new_tensor,
    torch.Tensor.__getitem__: _indexed,
    torch.Tensor.__setitem__: _indexed,
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.__deepcopy__: _deepcopy,
    torch.Tensor.tolist: _out_of_torch,
    torch.Tensor.numpy: _out_of_torch,
    torch.Tensor.__array__: _out_of_torch,
}
