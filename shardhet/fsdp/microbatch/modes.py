"""Base classes of torch function and dispatch modes that receive every call.

Each passes what torch calls to a method of one signature, ``run(func, args, kwargs)``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def tensors_among(values: Any) -> Iterator[Tensor]:
    """Iterate over the tensors that an operation takes or returns.

    An operation knows tensors, lists of them and values; to walk these as a pytree takes longer
    than most operations do on small tensors.
    """
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors_among(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors_among(value)


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operation writes to, if it is a mutable one."""
    for i, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_among(args[i] if i < len(args) else kwargs.get(argument.name))


class _Receiver:
    def run(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what ``func``, an operation or a function, returns to its caller."""
        raise NotImplementedError


class OperationMode(_Receiver, TorchDispatchMode):
    """Receives every operation, below autograd, while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.run(func, args, kwargs or {})


class EagerMode(OperationMode):
    """One that is entered where nothing is compiled.  Else the first operation would import
    torch._dynamo, which takes a second, to have it skip this.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.run(func, args, kwargs or {})


class FunctionMode(_Receiver, TorchFunctionMode):
    """Receives every call of a function of torch, above autograd, while it is entered."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.run(func, args, kwargs or {})


class FunctionTensor(Tensor):
    """A tensor whose class receives every call of a function of torch on it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls._call(func, args, kwargs or {})

    @classmethod
    def _call(
        cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what the function ``func`` returns to its caller."""
        raise NotImplementedError
