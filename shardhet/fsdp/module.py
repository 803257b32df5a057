"""HetFSDP: the module that users wrap around theirs."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardhet.comm.groups import default_group
from shardhet.comm.members import Members
from shardhet.fsdp.batch_norm import BatchNorms
from shardhet.fsdp.build import MixedPrecision, build_units, find_pieces, planned_units
from shardhet.fsdp.caches import CacheSwitch
from shardhet.fsdp.comm import CommContext
from shardhet.fsdp.flat import FlatTensor
from shardhet.fsdp.intercept import intercept
from shardhet.fsdp.loss import HeadLoss
from shardhet.fsdp.materialize import RowSource
from shardhet.fsdp.mean_backward import MeanBackward, warn_of_large_output
from shardhet.fsdp.observer import Activity, Observer
from shardhet.fsdp.optimizer_gate import know, know_given_up
from shardhet.fsdp.param_hooks import ParamHooks
from shardhet.fsdp.rows import RowGroup
from shardhet.fsdp.runtime import Runtime
from shardhet.fsdp.signature import BatchDims, ModelCall
from shardhet.fsdp.state_door import ModuleWithState
from shardhet.fsdp.surface import guard_root
from shardhet.fsdp.unit_by_unit import check_is_not_open, refuse_to_save_rows, unit_by_unit
from shardhet.fsdp.wrapping import find_units
from shardhet.records.cluster import DeviceSpec
from shardhet.records.plan import Plan


class HetFSDP(ModuleWithState):
    """``module`` trained by all ranks together, each computing and storing what ``plan`` says.

    One step:

        loss_sum, num_tokens = model(inputs, targets)  # this rank's samples, in plan order
        model.backward(loss_sum, num_tokens)           # the one door to backward
        optimizer.step(); optimizer.zero_grad()

    Construction, forward, backward and the state dicts are collective.  ``parameters()`` are
    this rank's rows of each parameter.  A rank without samples calls with an empty batch (or
    with nothing) and gets zeros.

    Args:
        module: equal on all ranks, or on the meta device.
        plan: equal on all ranks; its devices may be in another order than the ranks.
        group: None is the default group, or no group at all for one process.
        device: where to train; None is where the parameters are (the CPU for meta ones).
        units: module classes or fqns; None finds blocks, embeddings and head.
        param_dtype: of parameters in flight and of activations; None is as stored.
        reduce_dtype: of gradients while they accumulate and are summed.
        loss_fn: for models that return logits.  It is applied to the output of the last
            unit, microbatch by microbatch, as ``loss_fn(output, *loss_inputs)`` with the
            ``loss_inputs`` given to forward, and returns ``(loss_sum, num_tokens)``.
        batch_dim: where the arguments of the model's forward hold the samples: 1 for
            sequence-first models; or by argument, ``{"src": 1, "table": None}``, with None
            for an argument without samples and 0 for those that are not named.
        seed: of dropout and of meta initialisation.
        device_spec: what this rank announces itself as; None asks the driver.
        init_fn: initialises what was on the meta device, module by module; None is each
            module's own ``reset_parameters``.  Values depend on ``seed``, not on the plan.
        row_source: has values of parameters on the meta device; each rank reads its rows.

    Raises ``ValueError`` on every rank where plan, model and devices do not fit together.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        units: Sequence[type[nn.Module] | str] | None = None,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        loss_fn: Callable[..., tuple[Tensor, Tensor]] | None = None,
        batch_dim: BatchDims = 0,
        seed: int = 0,
        device_spec: DeviceSpec | None = None,
        init_fn: Callable[[nn.Module], None] | None = None,
        row_source: RowSource | None = None,
    ) -> None:
        """Cut ``module`` up among the ranks of ``group``; see the class.  Collective."""
        super().__init__()
        group, device = default_group(group), device or _device_of(module)
        members = Members.meet(group, plan, device=device, device_spec=device_spec)
        self._lifeline = members.lifeline
        self._control = members.control
        self._comm = CommContext(device, members.gather, members.reduce)
        fqns = [fqn for fqn, _ in module.named_parameters()]
        hooks = ParamHooks(module)
        before = [(fqn, ref(param)) for fqn, param in module.named_parameters()]
        with self._lifeline.guard("wrapping the model"):
            norms = BatchNorms(module)
            modules_of_units = find_units(module, units, keeps_last=loss_fn is not None)
            *built, root = build_units(
                module,
                modules_of_units,
                plan,
                comm=self._comm,
                control=members.control,
                precision=MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
                seed=seed,
                init_fn=init_fn,
                row_source=row_source,
            )
        self.plan = replace(plan, units=planned_units([*built, root]))
        self.position = members.control.position
        self._flats = [flat for unit in (*built, root) for flat in unit.flats]
        self._param_by_fqn = _in_order(fqns, self._flats)
        self._rows = RowGroup(self._comm, members.control, self._lifeline)
        if not self._rows.is_alone:  # or rows are all there is
            know(self._param_by_fqn.values(), self._lifeline)
        alive = [(fqn, param) for fqn, each in before if (param := each()) is not None]
        know_given_up(alive, self._lifeline)
        hooks.leave_out_present(self._param_by_fqn)
        self.module = module
        self._loss = HeadLoss(loss_fn)
        self._batch_dim = batch_dim
        self._cache_switch = CacheSwitch(module)
        self._forward = module.forward
        self._runtime = Runtime(
            built,
            root,
            plan=plan,
            comm=self._comm,
            control=members.control,
            lifeline=self._lifeline,
            seed=seed,
            module=module,
            norms=norms,
        )
        self._backward = MeanBackward(
            self._runtime, self._flats, self._param_by_fqn, hooks, self._rows
        )
        pieces = find_pieces(module, modules_of_units, param_dtype)
        intercept(module, self._runtime, self._loss, pieces)
        guard_root(module, root, built, self._lifeline)
        refuse_to_save_rows(module)

    # Training #

    def forward(self, *args: Any, loss_inputs: Any = (), **kwargs: Any) -> Any:
        """The module's output for this rank's samples.  Collective.

        The first tensor among the arguments says how many samples there are.  A rank without
        samples passes none, or nothing at all, and gets zeros of the same kind of output.
        ``loss_inputs`` (a tensor or a tuple) go to ``loss_fn``.
        """
        loss_inputs = loss_inputs if isinstance(loss_inputs, tuple) else (loss_inputs,)
        with self._lifeline.guard("model(...)"):
            check_is_not_open(self._runtime)
            self._check_intact()
            call = ModelCall.of(self._forward, args, kwargs, loss_inputs, self._batch_dim)
            output = self._runtime.forward(self._run_module, call, self.module.training)
        self._backward.num_forwards += 1
        if output is None:
            zero = torch.zeros((), device=self._comm.device)
            return zero, torch.zeros((), dtype=torch.int64, device=self._comm.device)
        self._backward.expect(output)
        warn_of_large_output(output)
        return output

    def _run_module(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], loss_inputs: tuple[Any, ...]
    ) -> Any:
        with self._loss.of(loss_inputs), self._cache_switch.off():
            return self.module(*args, **kwargs)

    def backward(self, loss_sum: Tensor, num_tokens: Tensor | int) -> float | None:
        """Gradients of the mean loss over all tokens of all ranks; returns it.  Collective.

        ``loss_sum`` is the sum over this rank's valid tokens, ``num_tokens`` their number.
        Gradients are summed over ranks; those already there are added to.  A parameter that
        no rank has a gradient for keeps None.  Returns None, and leaves no gradient, if no rank
        has a valid token.  Raises ``FloatingPointError`` on every rank if the loss is not
        finite; the model may be used again after that.
        """
        return self._backward.run(loss_sum, num_tokens)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global 2-norm is at most ``max_norm``.  Collective.

        Returns the norm before.  Equals ``torch.nn.utils.clip_grad_norm_`` on the whole model.
        """
        grads = [p.grad for p in self._param_by_fqn.values() if p.grad is not None]
        with torch._C.DisableTorchFunctionSubclass():
            filled = [grad for grad in grads if grad.numel()]
            norms = torch._foreach_norm(filled, 2.0) if filled else ()
            with self._runtime.observers.watch("", Activity.AGREE):
                total_norm = self._rows.norm(
                    norms, 2.0, num_grads=len(grads), call="clip_grad_norm_"
                )
            scale = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
            for dtype in {grad.dtype for grad in filled}:
                same = [grad for grad in filled if grad.dtype == dtype]
                torch._foreach_mul_(same, scale.to(dtype))
        return total_norm

    @property
    def device(self) -> torch.device:
        """Where this rank trains."""
        return self._comm.device

    @property
    def rank(self) -> int:
        """This process's rank in the group; state dicts are whole on rank zero."""
        return self._control.rank_by_position[self.position]

    @property
    def step(self) -> int:
        """Optimizer steps finished; set it when a run is resumed (dropout depends on it)."""
        return self._runtime.step

    @step.setter
    def step(self, step: int) -> None:
        self._runtime.step = step

    # What optimizers and users see #

    @property
    def units(self) -> tuple[str, ...]:
        """Fqns of the units in module order; "" is the root with what they leave over."""
        return tuple(unit.fqn for unit in self.plan.units)

    def unit_by_unit(self) -> AbstractContextManager[None]:
        """A context in which the module inside, or any part of it, is called directly.

            with model.unit_by_unit():
                tokens = model.module.generate(prompts)

        Every call of a unit gathers its parameters, runs the module's own forward on the
        inputs as they are, and frees them again.  Without gradients.  Entering and leaving is
        collective; inside, ranks may call different units, or none.
        """
        return unit_by_unit(
            self._runtime, comm=self._comm, control=self._control, lifeline=self._lifeline
        )

    def guard(self, doing: str) -> AbstractContextManager[None]:
        """A context around what other ranks wait for: if it fails, they all end and say so."""
        return self._lifeline.guard(doing)

    def add_observer(
        self, observer: Observer, *, counts_cpu: bool = False, times_device: bool = False
    ) -> None:
        """Call ``observer`` for each computation and wait (``Observed``) from now on.

        ``counts_cpu`` fills in ``cpu_s``, which costs two calls of the kernel each;
        ``times_device`` makes ``seconds`` those of an accelerator, which has seldom finished
        when ``observer`` is called: keep them and read them after something that waits.
        """
        self._runtime.observers.add(observer, counts_cpu=counts_cpu, times_device=times_device)

    def name_in_trace(self, *, is_traced: bool) -> None:
        """Name computations and waits, per unit, in what torch.profiler records from now on."""
        self._runtime.observers.is_traced = is_traced


def _in_order(fqns: Sequence[str], flats: Sequence[FlatTensor]) -> dict[str, nn.Parameter]:
    """The sharded parameters by name, in the order that the plain model has them."""
    params = {
        slot.fqn: param
        for flat in flats
        for slot, param in zip(flat.slots, flat.sharded_params, strict=True)
    }
    return {fqn: params[fqn] for fqn in fqns}


def _device_of(module: nn.Module) -> torch.device:
    devices = {t.device for t in (*module.parameters(), *module.buffers())} - {
        torch.device("meta")
    }
    if len(devices) > 1:
        raise ValueError(
            f"the module lies on {sorted(map(str, devices))}. Move it to one device, or pass "
            "device."
        )
    return devices.pop() if devices else torch.device("cpu")
