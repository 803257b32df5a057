"""Forward hooks that keep what they see do not see the probe of a model's first call."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardhet import HetFSDP, Plan
from tests.ordinary import WIDTH, Net

Hook = Callable[..., None]
seen_by_all: list[Tensor] = []
num_calls = 0


def in_list() -> tuple[Hook, Callable[[], Any]]:
    kept: list[Tensor] = []
    return lambda module, args, output: kept.append(output), lambda: kept


def by_module() -> tuple[Hook, Callable[[], Any]]:
    kept: dict[str, list[Tensor]] = defaultdict(list)

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        kept[type(module).__name__].append(output.detach())

    return hook, lambda: kept.get("LayerNorm", [])


def by_number() -> tuple[Hook, Callable[[], Any]]:
    number, total = 0, torch.zeros(()).double()

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal number
        number += 1
        total.add_(output.detach().square().sum())

    return hook, lambda: [torch.tensor(number), total]


class Collector:
    def __init__(self) -> None:
        self.outputs: list[Tensor] = []
        self.calls, self.mean = 0, 0.0

    def keep(self, output: Tensor) -> None:
        self.outputs.append(output.detach())
        self.mean = 0.9 * self.mean + 0.1 * output.detach().square().mean().item()

    def watch(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.calls += 1
        self.keep(output)

    __call__ = watch

    def found(self) -> list[Tensor]:
        return [torch.tensor([self.calls, self.mean]), *self.outputs]


def by_method() -> tuple[Hook, Callable[[], Any]]:
    collector = Collector()
    return collector.watch, collector.found


def by_object() -> tuple[Hook, Callable[[], Any]]:
    collector = Collector()
    return collector, collector.found


def through_partial() -> tuple[Hook, Callable[[], Any]]:
    collector = Collector()

    def hook(of: Collector, module: nn.Module, args: Any, output: Tensor) -> None:
        of.calls += 1

    return partial(hook, collector), collector.found


def in_closure() -> tuple[Hook, Callable[[], Any]]:
    collector = Collector()
    return lambda module, args, output: collector.keep(output), collector.found


def in_global() -> tuple[Hook, Callable[[], Any]]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        global num_calls
        num_calls += 1
        seen_by_all.append(output.detach())

    return hook, lambda: [torch.tensor(num_calls), *seen_by_all]


@pytest.mark.parametrize(
    "make",
    [
        in_list,
        by_module,
        by_number,
        by_method,
        by_object,
        through_partial,
        in_closure,
        in_global,
    ],
)
def test_hooks_keep_what_they_keep_without_a_probe(make: Callable[..., Any]) -> None:
    global num_calls
    found: list[list[Tensor]] = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        seen_by_all.clear()
        num_calls = 0
        module = Net()
        hook, kept = make()
        module.norm.register_forward_hook(hook)
        model = module if is_plain else HetFSDP(module, Plan.even(1, microbatch_size=4))
        x, y = torch.randn(4, WIDTH).double(), torch.randn(4, 3).double()
        for part in (slice(4), slice(2)):  # which are probed each
            for grads in (True, False):
                with torch.set_grad_enabled(grads):
                    model(x[part], y[part])
        found.append(list(kept()))
    assert len(found[1]) == len(found[0])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() < 1e-12
