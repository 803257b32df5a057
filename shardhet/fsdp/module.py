"""HetFSDP: the module that users wrap around theirs."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardhet.comm.groups import default_group
from shardhet.comm.liveness.watch import watch_unless_decided
from shardhet.comm.members import Members, is_rehearsal, planned_device
from shardhet.fsdp.microbatch.batch_norm import BatchNorms
from shardhet.fsdp.microbatch.batching import CountRows, known_ragged
from shardhet.fsdp.microbatch.layered import autocast_as, autocast_dtype_now
from shardhet.fsdp.microbatch.loss import FusedLoss
from shardhet.fsdp.microbatch.signature import BatchDims
from shardhet.fsdp.microbatch.surroundings import CacheSwitch
from shardhet.fsdp.options import batch_dims, checked, device_for
from shardhet.fsdp.params import host_step
from shardhet.fsdp.params.optimizer_check import OriginalParams
from shardhet.fsdp.params.row_group import Rows, ShardGroup
from shardhet.fsdp.params.row_params import ParamHooks, guard
from shardhet.fsdp.sharding.build import build_units, find_pieces, planned_units
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.fsdp.sharding.flat import FlatTensor
from shardhet.fsdp.sharding.materialize import RowSource
from shardhet.fsdp.stages.channels import beyond_stages, comm_of_units, find_units_by
from shardhet.fsdp.stages.step import Pipeline
from shardhet.fsdp.step.around import Activity, Observer
from shardhet.fsdp.step.calls import intercept
from shardhet.fsdp.step.mean_loss import MeanLoss
from shardhet.fsdp.step.round_by_round import RoundByRound
from shardhet.fsdp.step.runtime import Runtime
from shardhet.fsdp.step.unit_by_unit import unit_by_unit
from shardhet.fsdp.step_api import ModuleInRounds, in_tuple
from shardhet.fsdp.surface import guard_root
from shardhet.fsdp.tokens.skeleton import Skeleton
from shardhet.records.cluster import DeviceSpec
from shardhet.records.plan import Plan


class HetFSDP(ModuleInRounds):
    """Trains ``module`` on all ranks; each computes and stores what ``plan`` assigns to it.

    One step:

        loss_sum, num_tokens = model(inputs, targets)  # this rank's samples, in plan order
        model.backward(loss_sum, num_tokens)           # instead of loss.backward()
        optimizer.step(); optimizer.zero_grad()

    or, for all rounds of a plan that has several, with the samples of ``plan.sample_indices``:

        loss = model.forward_backward(inputs, targets)

    Construction, forward, backward and the state dicts are collective.  ``parameters()``
    returns this rank's rows of each parameter.  A rank without samples calls the model with an
    empty batch (or without arguments) and gets zeros.  Ranks are watched (``watch_ranks``).

    Args:
        module: equal on all ranks, or on the meta device.
        plan: equal on all ranks; its path, or batch sizes; devices may be in another order.
        group: None uses the default group, or no group if there is only one process.
        device: where to train; None: the module's accelerator, or this rank's (LOCAL_RANK).
        units: module classes, fqns or patterns of them; None finds blocks, embeddings and head.
        param_dtype: dtype of gathered parameters, arguments and activations; None: as stored.
            In float16 scale the loss: ``model.backward(scaler.scale(loss_sum), num_tokens)``.
        reduce_dtype: dtype in which gradients are accumulated and summed over ranks; None
            is that of the stored parameters (float32, usually, whatever ``param_dtype`` is).
        loss_fn: for models that return predictions: ``loss_fn(output, *loss_inputs)`` of the
            last unit's, microbatch by microbatch, or of the model's if it returns others, gives
            ``(loss_sum, num_tokens)``; see ``shardhet.mean_of_samples``.
        batch_dim: the dimension of the model's arguments that holds the samples: 1 for
            sequence-first models; or one per argument, ``{"src": 1, "table": None}``, with
            None for an argument without samples; arguments that are not named have 0.
        ragged: how many rows samples have, if not one each: ``{"patches": lambda batch: ...}``.
        seed: for dropout and for the initialisation of meta parameters.
        device_spec: what this rank reports of an emulated device; None asks the driver.
        rehearse: run a plan for any devices on CPUs, as ``shardhet rehearse PROGRAM`` does.
        init_fn: initialises what was on the meta device, module by module; None calls each
            module's own ``reset_parameters``.  Values depend on ``seed``, not on the plan.
        row_source: supplies the values of meta parameters; each rank reads only its rows.

    Raises ``ValueError`` on every rank if plan, model and devices do not fit together.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan | str | Path | Sequence[int],
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        units: Sequence[type[nn.Module] | str] | None = None,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        loss_fn: Callable[..., tuple[Tensor, Tensor]] | None = None,
        batch_dim: BatchDims = 0,
        ragged: Mapping[str, CountRows] | None = None,
        seed: int = 0,
        device_spec: DeviceSpec | None = None,
        rehearse: bool = False,
        init_fn: Callable[[nn.Module], None] | None = None,
        row_source: RowSource | None = None,
    ) -> None:
        super().__init__()
        self._loss, group = FusedLoss(loss_fn), default_group(group)
        plan, self._precision = checked(module, plan, loss_fn, seed, param_dtype, reduce_dtype)
        mine = planned_device(plan, group) if rehearse or is_rehearsal() else device_spec
        device = device_for("cpu" if rehearse or is_rehearsal() else device, module)
        members = Members.of_plan(group, plan, device=device, device_spec=mine)
        watch_unless_decided(plan.world_size, device)
        self._control, self._peers = members.control, members.peers
        self._comm = CommContext(device, members.gather, members.reduce, members.nodes)
        hooks, before, norms = ParamHooks(module), OriginalParams(module), BatchNorms(module)
        with self._peers.fail_together("wrapping the model"):
            self._comm.follow(plan, self._control)
            norms.warn(plan, position=members.control.position)
            of_units = comm_of_units(plan, self._comm, self._control)
            if plan.context_groups is not None:
                self._skeleton = Skeleton(module, self._loss, batch_dim)
            modules_of_units = find_units_by(plan, module, units, loss_fn)
            self.beyond_stages = beyond_stages(module, modules_of_units)
            *built, root = build_units(
                module,
                modules_of_units,
                plan,
                comm=of_units,
                root_comm=self._comm,
                control=members.control,
                precision=self._precision,
                seed=seed,
                init_fn=init_fn,
                row_source=row_source,
            )
        self.plan = replace(plan, units=planned_units([*built, root]))
        self._flats = [flat for unit in (*built, root) for flat in unit.flats]
        self._rows = ShardGroup(self._comm, members.control, self._peers, weakref.ref(self))
        _know_params(self, hooks, before)
        self.module, self._ragged = module, known_ragged(module, ragged)
        self._caches = CacheSwitch(module)
        self._batch_dim, self._forward = batch_dims(batch_dim, module.forward), module.forward
        self._make_runtime = partial(
            Runtime,
            built,
            root,
            group=self._rows,
            seed=seed,
            module=module,
            norms=norms,
            caches=self._caches,
            loss=self._loss,
        )
        self._make_mean = partial(
            MeanLoss,
            param_by_fqn=self._param_by_fqn,
            hooks=hooks,
            is_float16=param_dtype is torch.float16,
        )
        self._pieces = find_pieces(module, modules_of_units, param_dtype)
        self.compute_by(plan, of_units)
        guard_root(module, root, built, self._peers)
        self._watch_states(self._rows)
        self.position, self._is_built = members.control.position, True

    def compute_by(self, plan: Plan, of_units: CommContext) -> None:
        """Take steps as ``plan`` says, with units gathered over ``of_units``.  Collective."""
        before: Runtime | None = self.__dict__.get("_runtime")
        observers = None if before is None else before.observers
        self._runtime = self._make_runtime(plan=plan, comm=of_units, observers=observers)
        if before is not None:
            self._runtime.rounds.end_step(before.rounds.step)
            self._runtime.asks_to_end = before.asks_to_end
            self._runtime.raises_bad_loss = before.raises_bad_loss
            self._runtime.follow(plan, before.rounds.batches_per_step)
        self._mean = self._make_mean(self._runtime)
        of_steps = self._runtime, self._mean, self._run_module
        self._by_round = RoundByRound(*of_steps)
        self._pipeline = None if plan.stages is None else Pipeline(*of_steps)
        intercept(self.module, self._runtime.calls, self._loss.for_plan(plan), self._pieces)

    # Training #

    def forward(self, *args: Any, loss_inputs: Any = (), **kwargs: Any) -> Any:
        """The module's output for this rank's samples.  Collective.

        The first tensor among the arguments determines the number of samples.  A rank without
        samples passes an empty batch, or no arguments, and gets an output of the same structure
        made of zeros.  ``loss_inputs`` (a tensor or a tuple) are passed on to ``loss_fn``;
        without those that it needs, the output is the module's own: predictions, for which
        gradients are disabled.

        Under stages it is for evaluation, with gradients disabled: every rank passes its
        samples of all rounds, as to ``forward_backward`` or in more rounds, and ranks of the
        last stage get the output of theirs, others one without samples.
        """
        if torch.is_inference_mode_enabled():  # whose tensors do not tell that they are written
            with torch.inference_mode(mode=False), torch.no_grad():
                return self.forward(*args, loss_inputs=loss_inputs, **kwargs)
        if self._pipeline is not None:
            output = self._evaluate_stages(self._pipeline, args, kwargs, loss_inputs)
            return _loss_of_none(self.device) if output is None else output
        with self._peers.fail_together("model(...)"):
            self._check_can_run()
            call = self._call_of_round((args, kwargs, in_tuple(loss_inputs)))
            with self._forgetting_rounds():
                output = self._by_round.forward(call, is_training=self.module.training)
        output = self._by_round.expect(output)
        return _loss_of_none(self.device) if output is None else output

    def _run_module(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], loss_inputs: tuple[Any, ...]
    ) -> Any:
        kind = self.device.type
        autocast = autocast_as(kind, autocast_dtype_now(kind))  # also of probes of one context
        outside = self._runtime.around_root()
        with self._loss.of(loss_inputs), self._caches.off(), autocast, outside:
            wrapped = partial(self._function, self.module) if self._function else self.module
            output = wrapped(*args, **kwargs)
            output = self._loss.of_output(output)
        self._loss.check_returned(output)
        return output

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global 2-norm is at most ``max_norm``.  Collective.

        Returns the norm before scaling.  Equals ``torch.nn.utils.clip_grad_norm_`` on the whole
        model.
        """
        grads = [p.grad for p in self._param_by_fqn.values() if p.grad is not None]
        with torch._C.DisableTorchFunctionSubclass(), host_step.host_threads(self._comm):
            filled = [grad for grad in grads if grad.numel()]
            norms = torch._foreach_norm(filled, 2.0) if filled else ()
            with self._runtime.observers.watch("", Activity.AGREE):
                total_norm = self._rows.norm(
                    norms, 2.0, num_grads=len(grads), call="clip_grad_norm_"
                )
            self._runtime.rounds.grad_norm = (
                total_norm if self.grad_norm is None else self.grad_norm
            )
            scale = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
            for dtype in {grad.dtype for grad in filled}:
                same = [grad for grad in filled if grad.dtype == dtype]
                scale = scale.to(same[0].device)  # of the host, if its rows are there
                torch._foreach_mul_(same, scale.to(dtype))
        return total_norm

    @property
    def device(self) -> torch.device:
        """The device that this rank trains on."""
        return self._comm.device

    # What optimizers and users see #

    @property
    def units(self) -> tuple[str, ...]:
        """Fqns of the units in module order; "" is the root, which has all other parameters."""
        return tuple(unit.fqn for unit in self.plan.units)

    def unit_by_unit(self, *, if_outside: bool = False) -> AbstractContextManager[None]:
        """A context in which the wrapped module, or any part of it, can be called directly.

            with model.unit_by_unit():
                tokens = model.module.generate(prompts)

        Every call of a unit gathers its parameters, runs the module's own forward on the
        unsplit inputs, and frees the parameters again.  Gradients are disabled.  Entering and
        leaving are collective; inside, ranks may call different units, or none.  With
        ``if_outside``, nothing is done within the context, or within the model's forward.
        """
        call = partial(unit_by_unit, control=self._control, peers=self._peers)
        return call(self._runtime, if_outside=if_outside)

    def add_observer(
        self, observer: Observer, *, counts_cpu: bool = False, times_device: bool = False
    ) -> Callable[[], None]:
        """Call ``observer`` for each computation and wait (``Observed``); returns what ends it.

        ``counts_cpu`` fills in ``cpu_s``, at the cost of two system calls per observation.
        ``times_device`` measures ``seconds`` on the accelerator: read them once it is done.
        """
        add = self._runtime.observers.add
        return add(observer, counts_cpu=counts_cpu, times_device=times_device)

    def name_in_trace(self, *, is_traced: bool) -> None:
        """Label computations and waits, per unit, in torch.profiler's records from now on."""
        self._runtime.observers.is_traced = is_traced


def _know_params(model: HetFSDP, hooks: ParamHooks, before: OriginalParams) -> None:
    """Let optimizers step rows, and refuse those that hold parameters from ``before``."""
    model._param_by_fqn = _in_order(before.by_fqn, model._flats)
    if model._control.group is not None:  # a lone rank stores whole parameters
        places = [(flat, i) for flat in model._flats for i in range(len(flat.slots))]
        guard([_with_rows(*place, model._rows) for place in places])
    host_step.know(model._param_by_fqn.values(), model._rows)
    before.give_up(model._peers)
    hooks.leave_out_present(model._param_by_fqn)


def _loss_of_none(device: torch.device) -> tuple[Tensor, Tensor]:
    """The output if no rank has samples: a loss, and the number of its tokens."""
    zero = torch.zeros((), device=device)
    return zero, torch.zeros((), dtype=torch.int64, device=device)


def _in_order(fqns: Iterable[str], flats: Sequence[FlatTensor]) -> dict[str, nn.Parameter]:
    """The sharded parameters by fqn, in the order of the plain model."""
    params = {
        slot.fqn: param
        for flat in flats
        for slot, param in zip(flat.slots, flat.sharded_params, strict=True)
    }
    return {fqn: params[fqn] for fqn in fqns}


def _with_rows(
    flat: FlatTensor, i: int, group: ShardGroup
) -> tuple[nn.Parameter, Callable[[], Rows]]:
    """A sharded parameter, and what says which rows are here; it keeps no rows alive."""
    fqn, cuts = flat.slots[i].fqn, flat.cuts  # a list that stays the same
    return flat.sharded_params[i], lambda: Rows(group, fqn, (cuts[i],))
