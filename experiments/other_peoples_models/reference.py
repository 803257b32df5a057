"""What one process gives: the plan's microbatches one after the other, seeded as planned."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from experiments.other_peoples_models import calls
from experiments.other_peoples_models.comparison import (
    Errors,
    Step,
    compare_steps,
    copies,
    quiet,
    sum_in_order,
)
from experiments.other_peoples_models.plans import BY_TOKENS, microbatches_of
from experiments.other_peoples_models.records import Family, Named, Way
from experiments.other_peoples_models.tasks import Batch
from shardhet.fsdp.microbatch.surroundings import CacheSwitch
from tests.seeded import seeded, unit_by_param


@dataclass(kw_only=True)
class Reference:
    """A run of plain torch, and how exact plain torch itself is."""

    steps: list[Step]
    state: dict[str, Tensor]  # the state dict at the end
    unit_by_param: dict[str, str]
    noise: dict[str, float]  # of another accumulation order, by quantity
    start_s: float
    step_s: float


def run_reference(
    family: Family, way: Way, named: Named, path: Path, noise: dict[str, float] | None
) -> None:
    """Write the ``Reference`` of a case to ``path``; ``noise`` where it is known already."""
    quiet()
    started_at_s = time.process_time()
    model = calls.make_model(family, way)
    trainer = _Plain(model, family, way, named)
    trainer.train()
    first_s = trainer.ended_at_s[0] - started_at_s
    units = unit_by_param(model, calls.units_of(model, family, way))
    if noise is None:
        noise = _noise(family, way, named, trainer.steps, units)
    reference = Reference(
        steps=trainer.steps,
        state=copies(model.state_dict()),
        unit_by_param=units,
        noise=noise,
        start_s=first_s,
        step_s=trainer.least_step_s,
    )
    torch.save(reference, path)


def _noise(
    family: Family, way: Way, named: Named, steps: list[Step], units: dict[str, str]
) -> dict[str, float]:
    orders = [_Plain(calls.make_model(family, way), family, way, named, is_reversed=True)]
    if not ((family.is_random and way.drops) or family.has_batch_norm or way.has_lora):
        orders.append(_Plain(calls.make_model(family, way), family, way, named, is_whole=True))
    if CacheSwitch(orders[0].model).is_asked_for:
        # Without a KV cache keys lie otherwise in memory, so other kernels multiply them.
        orders.append(_Plain(calls.make_model(family, way), family, way, named, caches=False))
    if named.name in BY_TOKENS:  # what comes before or after is computed in float32 by some
        model = calls.make_model(family, way)
        orders.append(_Plain(model, family, way, named, in_pieces=True))
    noise = Errors(unit_by_param=units).by_quantity
    if named.plan.num_rounds > 1:  # which divide last
        model = calls.make_model(family, way)
        orders.append(_Plain(model, family, way, named, divides_last=True))
    for each in orders:
        each.train()
        found = compare_steps(each.steps, steps, units).by_quantity
        noise = {quantity: max(noise[quantity], found[quantity]) for quantity in noise}
    return noise


class _Plain:
    """Training without HetFSDP."""

    def __init__(
        self,
        model: nn.Module,
        family: Family,
        way: Way,
        named: Named,
        *,
        is_reversed: bool = False,  # gradients are added from the last microbatch on
        is_whole: bool = False,  # one batch, no microbatches
        caches: bool = True,  # if its configuration asks for them
        in_pieces: bool = False,  # attention, and products of each token alone
        divides_last: bool = False,  # the gradients, by the number of labels, and not the loss
    ) -> None:
        self.steps: list[Step] = []
        self.ended_at_s: list[float] = []
        self._took_s: list[float] = []
        self.model = model
        self._caches = caches
        self._family = family
        self._way = way
        self._named = named
        self._is_reversed, self._in_pieces = is_reversed, in_pieces
        self._divides_last = divides_last or way.is_staged  # as rounds do
        total = named.plan.global_batch_size
        self._microbatch_sizes = [total] if is_whole else microbatches_of(named.plan)
        params = [param for param in model.parameters() if param.requires_grad]
        self._optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)

    @property
    def least_step_s(self) -> float:
        """Of the steps after the first."""
        return min(self._took_s[1:])

    def train(self) -> None:
        """All steps."""
        num_samples = self._named.plan.global_batch_size
        for number, batch in enumerate(
            calls.make_batches(self._family, self._way, num_samples)
        ):
            logits = None
            if self._way.evaluates:
                size = sum(self._named.eval_sizes)
                logits = calls.evaluated(
                    self.model, batch, self._family, self._way, 0, size
                ).clone()
            started_at_s = time.process_time()
            step = self._step(number, batch)
            self.ended_at_s.append(time.process_time())
            self._took_s.append(self.ended_at_s[-1] - started_at_s)
            step.params = copies(dict(self.model.named_parameters()))
            step.buffers = copies(dict(self.model.named_buffers()))
            step.logits = logits
            self.steps.append(step)

    def _step(self, number: int, batch: Batch) -> Step:
        losses, grads = self._accumulate(number, batch)
        params = dict(self.model.named_parameters())
        if self._is_reversed:
            grads.reverse()
        summed = {name: sum_in_order([each[name] for each in grads]) for name in params}
        for name, param in params.items():
            param.grad = summed[name]
        kept = {name: None if g is None else g.clone() for name, g in summed.items()}
        norm = torch.nn.utils.clip_grad_norm_(params.values(), calls.MAX_NORM)
        if not norm.isfinite():
            raise ValueError(f"gradients of step {number} have the norm {norm}.")
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Step(
            loss=float(sum(losses)), norm=float(norm), grads=kept, params={}, buffers={}
        )

    def _accumulate(
        self, number: int, batch: Batch
    ) -> tuple[list[float], list[dict[str, Tensor | None]]]:
        """Parts of the mean loss, and gradients, of each microbatch."""
        num_labels = self._family.task.num_valid(batch["labels"])
        losses, grads = [], []
        first = 0
        units = calls.units_of(self.model, self._family, self._way)
        with seeded(self.model, units, calls.SEED) as seeds:
            for size in self._microbatch_sizes:
                part = calls.part_of(batch, self._family, first, size)
                seeds.start(step=number, first_sample=first)
                caches = nullcontext() if self._caches else CacheSwitch(self.model).off()
                with caches, _in_pieces() if self._in_pieces else nullcontext():
                    output = calls.call(self.model, part, self._family, self._way)
                loss_sum, _ = calls.loss_of(output, part, self._family, self._way)
                loss = loss_sum / num_labels
                (loss_sum if self._divides_last else loss).backward()
                losses.append(float(loss.detach()))
                if self._divides_last:
                    for param in self.model.parameters():
                        param.grad = None if param.grad is None else param.grad / num_labels
                grads.append({name: p.grad for name, p in self.model.named_parameters()})
                for param in self.model.parameters():
                    param.grad = None
                first += size
        return losses, grads


@contextmanager
def _in_pieces() -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH), _InPieces():
        yield


class _InPieces(TorchFunctionMode):
    """Products of each token alone, which other kernels add up in another order."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.linear or args[0].dim() < 2:
            return func(*args, **kwargs or {})
        rows, *others = args
        pieces = [func(each, *others, **kwargs or {}) for each in rows.split(1, -2)]
        return torch.cat(pieces, -2)


def load(path: Path) -> Reference:
    """What ``run_reference`` wrote."""
    reference: Reference = torch.load(path, weights_only=False)
    return reference
