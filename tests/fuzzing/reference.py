"""One process in plain PyTorch: the plan's microbatches, one after the other, seeded as
HetFSDP seeds them.

Root code runs per microbatch here and per rank there, so a root that mixes samples gives
something else.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.utils._pytree import tree_flatten

from shardhet.fsdp.microbatch.modes import FunctionMode
from shardhet.fsdp.microbatch.root_dropout import DROPOUT_CALLS
from shardhet.fsdp.sharding.seeds import microbatch_seed
from shardhet.fsdp.sharding.wrapping import find_units
from tests.fuzzing.model import Batch, FuzzModel, call_model, loss_of, part_of
from tests.fuzzing.shapes import FuzzCase, StepShape
from tests.patchwork import IGNORED


class SeededCalls:
    """Seeds of the microbatch that the reference is at, by unit and by dropout of the root."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._step = 0
        self._first_sample = 0
        self._calls_by_fqn: dict[str, int] = {}

        self._states: list[Tensor] = []  # of the generator, outside of what is being called

    def start(self, *, step: int, first_sample: int) -> None:
        """A microbatch begins, with root code."""
        self._step, self._first_sample, self._calls_by_fqn = step, first_sample, {}
        self._seed_call("")

    def enter(self, fqn: str) -> None:
        """Draw as this call does from now on."""
        self._states.append(torch.get_rng_state())
        self._seed_call(fqn)

    def leave(self) -> None:
        """Draw on as before it."""
        torch.set_rng_state(self._states.pop())

    @property
    def is_outside(self) -> bool:
        """Whether root code is running."""
        return not self._states

    def _seed_call(self, fqn: str) -> None:
        call = self._calls_by_fqn.get(fqn, 0)
        self._calls_by_fqn[fqn] = call + 1
        seed = microbatch_seed(self._seed, self._step, fqn, call, self._first_sample)
        # torch.manual_seed would format the stack for each kind of accelerator that is absent.
        torch.default_generator.manual_seed(seed)


class SeededFunctions(FunctionMode):
    """Dropout that root code calls as a function draws as a call of its own."""

    def __init__(self, seeds: SeededCalls) -> None:
        super().__init__()
        self._seeds = seeds

    def run(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if func is not dropout or not self._seeds.is_outside:
            return func(*args, **kwargs)
        self._seeds.enter(DROPOUT_CALLS)
        try:
            return func(*args, **kwargs)
        finally:
            self._seeds.leave()


class Reference:
    """The plain model, trained beside HetFSDP."""

    def __init__(self, model: FuzzModel, case: FuzzCase) -> None:
        self.model = model
        self._case = case
        self._num_forwards = 0
        options = case.options
        self._units = find_units(
            model, options.get("units"), keeps_last=options.get("loss_fn") is not None
        )

    def unit_by_param(self) -> dict[str, str]:
        """The unit (its first module's fqn) by whose largest gradient one is measured.

        Parameters of the root go with the embedding: their gradients are sums over samples,
        which the root of a rank adds in another order, and may be what is left of large ones.
        """
        unit_by_id = {
            id(param): unit.fqns[0]
            for unit in self._units
            for module in unit.modules
            for param in module.parameters()
        }
        params = self.model.named_parameters()
        return {fqn: unit_by_id.get(id(p), "embedding") for fqn, p in params}

    def train_step(self, batch: Batch, step: StepShape, index: int) -> float:
        """Gradients of the mean loss are added; returns the mean loss."""
        targets = batch["targets"]
        assert targets is not None
        num_tokens = (targets != IGNORED).sum()
        losses = []
        with self._seeded() as seeds:
            for first, size in self._microbatches(step.sizes):
                piece = part_of(self._case.model, batch, first, size)
                self.model.num_forwards = self._num_forwards
                seeds.start(step=index, first_sample=first)
                output = call_model(self._case.model, self.model, piece)
                loss_sum, _ = loss_of(self._case.model, output, piece)
                (loss_sum / num_tokens).backward()
                losses.append(loss_sum.detach())
        self._num_forwards += 1
        return float(sum(losses) / num_tokens)

    @torch.no_grad()
    def evaluate(self, batch: Batch, step: StepShape, position: int) -> list[Any]:
        """Leaves of the model's output for a position's samples, put together."""
        self.model.eval()
        first = sum(step.sizes[:position])
        joined: list[Any] = []
        for start, size in self._microbatches(step.sizes):
            if not first <= start < first + step.sizes[position]:
                continue
            piece = part_of(self._case.model, batch, start, size)
            output = call_model(self._case.model, self.model, piece)
            if self._case.options.get("loss_fn") is not None:
                output = self._case.options["loss_fn"](output, piece["targets"])
            leaves = tree_flatten(output)[0]
            joined = [*map(self._join, joined, leaves)] if joined else leaves
        self.model.train()
        return joined

    def _join(self, before: Any, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            assert before == leaf
            return leaf
        if leaf.dim() == 0:
            return before + leaf
        return torch.cat([before, leaf], self._case.model.batch_at)

    def _microbatches(self, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """First sample and size of each, in the order of the plan."""
        first = 0
        for rank, size in zip(self._case.plan.ranks, sizes, strict=True):
            for microbatch_size in rank.split(size) if size else ():
                yield first, microbatch_size
                first += microbatch_size

    @contextmanager
    def _seeded(self) -> Iterator[SeededCalls]:
        seeds = SeededCalls(self._case.options.get("seed", 0))
        modules = [(module, unit.fqns[0]) for unit in self._units for module in unit.modules]
        inside = {inner for module, _ in modules for inner in module.modules()}
        modules += [
            (module, fqn)
            for fqn, module in self.model.named_modules()
            if isinstance(module, nn.Dropout) and module not in inside
        ]
        hooks = [
            hook
            for module, fqn in modules
            for hook in (
                module.register_forward_pre_hook(lambda *_, fqn=fqn: seeds.enter(fqn)),
                module.register_forward_hook(lambda *_: seeds.leave()),
            )
        ]
        state = torch.get_rng_state()
        try:
            with SeededFunctions(seeds):
                yield seeds
        finally:
            torch.set_rng_state(state)
            for hook in hooks:
                hook.remove()
