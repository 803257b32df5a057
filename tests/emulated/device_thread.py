"""Backward in a thread of its own, as torch runs it for the tensors of a GPU."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


@contextmanager
def backward_elsewhere() -> Iterator[None]:
    """A context in which backward runs in another thread, which inherits modes alone.

    What backward calls on its way, another backward too, runs there as well.
    """
    run_backward: Callable[..., Any] = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    there = threading.local()

    def in_thread(modes: list[Any], args: Any, kwargs: Any) -> Any:
        there.is_here = True
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            return run_backward(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        if hasattr(there, "is_here"):
            return run_backward(*args, **kwargs)
        modes = [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]
        return threads.submit(in_thread, modes, args, kwargs).result()

    with (
        ThreadPoolExecutor(1, thread_name_prefix="autograd") as threads,
        mock.patch.object(torch.autograd, "_engine_run_backward", run),
    ):
        yield
