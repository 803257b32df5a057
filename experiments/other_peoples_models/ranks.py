"""What a rank does in a case: train with HetFSDP, and hold each step against plain torch."""

import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shardhet
from experiments.other_peoples_models import calls
from experiments.other_peoples_models.comparison import MISMATCH, Errors, Step, quiet, relative
from experiments.other_peoples_models.records import Family, Loss, Named, RankReport, Way
from experiments.other_peoples_models.reference import Reference, load
from experiments.other_peoples_models.tasks import Batch
from shardhet import HetFSDP

OUR_CODE = str(Path(shardhet.__file__).parent)
DELIBERATE = (ValueError, TypeError, RuntimeError, NotImplementedError)


def run_rank(family: Family, way: Way, named: Named, reference_path: Path) -> RankReport:
    """Its report; never raises."""
    quiet()
    rank = _Rank(family, way, named)
    try:
        rank.run(load(reference_path))
    except BaseException as error:
        return RankReport(
            phase=rank.phase,
            error=f"{type(error).__name__}: {error}",
            is_deliberate=_is_deliberate(error),
        )
    return RankReport(
        phase="end",
        errors=rank.errors.by_quantity,
        worst=rank.errors.worst,
        start_s=rank.start_s,
        step_s=rank.step_s,
    )


def _is_deliberate(error: BaseException) -> bool:
    """Raised by a raise statement of ours, and not by what we called."""
    if not isinstance(error, DELIBERATE):
        return False
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename.startswith(OUR_CODE) and (last.line or "").startswith("raise")


class _Rank:
    """A rank and what it has seen."""

    def __init__(self, family: Family, way: Way, named: Named) -> None:
        self.phase = "start"
        self.errors = Errors(unit_by_param={})
        self.start_s = 0.0
        self.step_s: list[float] = []
        self._comparing_s = 0.0  # of the step in progress
        self._family = family
        self._way = way
        self._named = named

    def run(self, reference: Reference) -> None:
        """All steps, then the state dict."""
        self.errors = Errors(unit_by_param=reference.unit_by_param)
        plan = self._named.plan
        batches = calls.make_batches(self._family, self._way, plan.global_batch_size)
        started_at_s = time.process_time()
        self.phase = "wrap"
        model = self._wrapped()
        optimizer = torch.optim.SGD(
            [param for param in model.parameters() if param.requires_grad],
            lr=0.05,
            momentum=0.9,
        )
        for number, (batch, expected) in enumerate(zip(batches, reference.steps, strict=True)):
            if self._way.evaluates:
                self._evaluate(model, batch, expected, number)
            step_started_at_s = time.process_time()
            self._step(model, optimizer, batch, expected, number)
            ended_at_s = time.process_time() - self._comparing_s
            self.step_s.append(ended_at_s - step_started_at_s)
            if number == 0:
                self.start_s = ended_at_s - started_at_s
            self._compare_state(model, expected, number)
        self.phase = "state dict"
        self._compare_state_dict(model, reference.state)

    def _wrapped(self) -> HetFSDP:
        model = calls.make_model(self._family, self._way)
        units = calls.wanted_units(self._family, self._way)
        options: dict[str, Any] = {"seed": calls.SEED, "units": units}
        if self._family.batch_dim != 0:
            options["batch_dim"] = self._family.batch_dim
        if self._way.loss is Loss.FUNCTION:
            options["loss_fn"] = self._loss_fn
        return HetFSDP(model, self._named.plan, **options)

    def _loss_fn(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss_sum, num_valid = self._family.task.loss(logits, labels)
        return loss_sum, torch.tensor(num_valid)

    def _step(
        self,
        model: HetFSDP,
        optimizer: torch.optim.Optimizer,
        batch: Batch,
        expected: Step,
        number: int,
    ) -> None:
        """One step as a user writes it, with what it computes held against ``expected``."""
        plan = self._named.plan
        if self._way.is_staged:
            mean = self._step_in_stages(model, batch, number)
        for i in range(0 if self._way.is_staged else plan.num_rounds):
            own = plan.round_samples(model.position, i)
            part = calls.part_of(batch, self._family, own.start, len(own))
            self.phase = f"forward of step {number}"
            loss_sum, num_valid = self._forward(model, part)
            self.phase = f"backward of step {number}"
            mean = model.backward(loss_sum, num_valid)
        compared_at_s = time.process_time()
        self._compare_grads(model, mean, expected, number)
        self._comparing_s = time.process_time() - compared_at_s
        self.phase = f"clipping of step {number}"
        norm = model.clip_grad_norm_(calls.MAX_NORM)
        self.errors.see_number("grad", float(norm), expected.norm, f"step {number}: norm")
        optimizer.step()
        optimizer.zero_grad()

    def _step_in_stages(self, model: HetFSDP, batch: Batch, number: int) -> float | None:
        family, plan = self._family, self._named.plan
        own = torch.tensor(plan.sample_indices(model.position), dtype=torch.int64)
        mine = {
            name: tensor.index_select(calls.batch_dim_of(family, name), own)
            for name, tensor in batch.items()
        }
        inputs, options = calls.inputs_of(mine, family, self._way)
        self.phase = f"forward of step {number}, all rounds of it"
        return model.forward_backward(**inputs, **options)

    def _forward(self, model: HetFSDP, batch: Batch) -> Any:
        """The sum of the losses of this rank's samples, and the number of their labels."""
        family, way = self._family, self._way
        if way.loss is Loss.FUNCTION:
            labels = (batch["labels"],)
            return family.logits(calls.call(model, batch, family, way, loss_inputs=labels))
        return calls.loss_of(calls.call(model, batch, family, way), batch, family, way, model)

    def _evaluate(self, model: HetFSDP, batch: Batch, expected: Step, number: int) -> None:
        self.phase = f"evaluation before step {number}"
        sizes = self._named.eval_sizes
        first, size = sum(sizes[: model.position]), sizes[model.position]
        found = calls.evaluated(model, batch, self._family, self._way, first, size)
        assert expected.logits is not None
        own = expected.logits.narrow(calls.batch_dim_of(self._family, "logits"), first, size)
        self.errors.see("grad", relative(found, own), f"evaluation before step {number}")

    def _compare_grads(
        self, model: HetFSDP, mean: float | None, expected: Step, number: int
    ) -> None:
        where = f"step {number}: gradient"
        self.errors.see_number(
            "loss", MISMATCH if mean is None else mean, expected.loss, f"step {number}: loss"
        )
        rows = {fqn: box.rows for fqn, box in model.sharded_state_dict().items()}
        found = {
            fqn: None if param.grad is None else param.grad.as_subclass(Tensor)
            for fqn, param in model.named_parameters()
        }
        self.errors.see_rows("grad", found, expected.grads, rows, where)

    def _compare_state(self, model: HetFSDP, expected: Step, number: int) -> None:
        boxes = model.sharded_state_dict()
        rows = {fqn: box.rows for fqn, box in boxes.items()}
        found = {fqn: box.tensor for fqn, box in boxes.items()}
        self.errors.see_rows("state", found, dict(expected.params), rows, f"after {number}")
        buffers = dict(model.named_buffers())
        self.errors.see_rows(
            "state", dict(buffers), dict(expected.buffers), None, f"buffers after {number}"
        )

    def _compare_state_dict(self, model: HetFSDP, expected: dict[str, Tensor]) -> None:
        found = model.state_dict()
        if model.position == 0:
            self.errors.see_rows("state", dict(found), dict(expected), None, "state_dict")
        elif found:
            self.errors.see("state", MISMATCH, "state_dict: not {} away from rank zero")
