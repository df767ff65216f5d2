"""Which elements of a slice's storages nothing has written yet."""

from __future__ import annotations

from . import region as rg
from .derive import Elsewhere, Tangled, locate
from .program import Ref
from .region import Box


class Coverage:
    """Which elements of the storages of a slice nothing has written yet."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[Ref, list[Box]]] = {}
        self._unsure: set[int] = set()
        self.check_unwritten = False

    def born(self, ref: Ref, num_bytes: int) -> None:
        """ref: any view of a storage of num_bytes that has just come to be."""
        if ref.numel() * ref.dtype.itemsize != num_bytes or rg.overlaps_itself(ref.sizes, ref.strides):
            ref = Ref(ref.storage, 0, (num_bytes // ref.dtype.itemsize,), (1,), ref.dtype)  # a part: track all of it
        self._left[ref.storage] = (ref, [rg.full_box(ref.sizes)])
        self._unsure.discard(ref.storage)

    def written(self, view: Ref, *, whole: bool = False, sure: bool = True) -> None:
        entry = self._left.get(view.storage)
        if entry is None:
            return
        ref, left = entry
        where = locate(ref, view)
        if whole or (sure and where is None):
            del self._left[view.storage]
        elif where is Tangled or (not sure and where is not Elsewhere):
            self._unsure.add(view.storage)
        elif where is not Elsewhere:
            left = [rest for piece in left for rest in rg.subtract(piece, where)]  # type: ignore[arg-type]
            if left:
                self._left[view.storage] = (ref, left)
            else:
                del self._left[view.storage]

    def reads_unwritten(self, view: Ref) -> bool:
        """Whether a read of view meets unwritten elements; where that depends on values, the played program checks."""
        entry = self._left.get(view.storage)
        if entry is None or not view.numel():
            return False
        ref, left = entry
        where = locate(ref, view)
        if where is Elsewhere:
            return False
        if where is not Tangled and where is not None:
            left = [piece for piece in left if rg.intersect(piece, where) is not None]  # type: ignore[arg-type]
        if not left:
            return False
        if view.storage in self._unsure or where is Tangled:
            self.check_unwritten = True
            return False
        return True
