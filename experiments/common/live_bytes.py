"""Bytes of the tensors that a process holds, whoever makes them."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Storages of tensors on the CPU: those that operations return, until they are freed.

    Storages that are emptied and filled again (``resize_``, as FSDP2 does) count as large as
    they are.  What operations on a DTensor make and free inside is not seen, which is to the
    advantage of FSDP2, and neither is what gloo allocates itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self._nbytes: dict[int, int] = {}  # by storage
        self.now = 0
        self.peak = 0

    def forget_peak(self) -> None:
        """The peak is what is held now."""
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, Tensor):
                self._see(each)
        return found

    def _see(self, tensor: Tensor) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if isinstance(tensor, FakeTensor) or tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._nbytes:
            self._nbytes[storage._cdata] = 0
            weakref.finalize(storage, self._forget, storage._cdata)
            self._set(storage._cdata, storage.nbytes())

    def _set(self, key: int, nbytes: int) -> None:
        self.now += nbytes - self._nbytes[key]
        self._nbytes[key] = nbytes
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._nbytes.pop(key)

    @contextmanager
    def counting(self) -> Iterator["LiveBytes"]:
        """Count what is made inside."""
        resize = UntypedStorage.resize_

        def resize_(storage: UntypedStorage, nbytes: int) -> None:
            resize(storage, nbytes)
            if storage._cdata in self._nbytes:
                self._set(storage._cdata, nbytes)

        with mock.patch.object(UntypedStorage, "resize_", resize_), self:
            yield self
