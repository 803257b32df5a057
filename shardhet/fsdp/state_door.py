"""State dicts and exchanges: the collective calls of HetFSDP besides a step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.nn.modules.module import _IncompatibleKeys

from shardhet.comm import devices
from shardhet.comm.channel import SECONDS_FOR_ALL_TO_COME, Channel
from shardhet.comm.groups import side_channel
from shardhet.fsdp.door import keep_out_arguments, loads_by_itself, stand_ins, watch_inside
from shardhet.fsdp.params.row_group import RowGroup
from shardhet.fsdp.params.state import (
    RowBox,
    gather_params,
    load_state_dict,
    sharded_state_dict,
)
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.fsdp.step.runtime import Runtime
from shardhet.fsdp.surface import ModuleOfRows

_BY_THEMSELVES = (
    "load_state_dict: modules {} run code of their own when a state dict is loaded, but this "
    "rank passes none. Pass it on every rank."
)


class ModuleWithState(ModuleOfRows):
    """A base of HetFSDP: its state dicts, whole and in rows, and how far training is."""

    _comm: CommContext
    _control: Channel
    _runtime: Runtime
    position: int

    def own_tokens(self, tensor: Tensor, *, are_labels: bool = False) -> Tensor:
        """This rank's part of a tensor [samples, tokens, ...]: its tokens in a context group,
        else all.  Of ``labels`` that the model shifts these are the next tokens'.
        """
        tokens = self._runtime.tokens
        return tensor if tokens is None else tokens.cutter.own_tokens(tensor, are_labels)

    @property
    def rank(self) -> int:
        """This process's rank in the group; state dicts are whole on rank zero."""
        return self._control.rank_by_position[self.position]

    def guard(self, doing: str) -> AbstractContextManager[None]:
        """A context for work that other ranks wait for: if it raises, all ranks raise."""
        return self._peers.guard(doing)

    @property
    def grad_norm(self) -> Tensor | None:
        """What ``clip_grad_norm_`` has returned after this step, if it was called."""
        return self._runtime.rounds.grad_norm

    def skip_bad_loss(self, *, skips: bool) -> None:
        """Whether to return NaN, and set no gradients, where a loss is not finite; or raise."""
        self._runtime.raises_bad_loss = not skips

    @property
    def step(self) -> int:
        """The number of finished steps; set it to resume a run (dropout depends on it)."""
        return self._runtime.rounds.step

    @step.setter
    def step(self, step: int) -> None:
        self._runtime.rounds.end_step(step)

    def state_dict(  # type: ignore[override]  # whose overloads have nothing to choose
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Whole tensors under the model's own names on rank zero; {} elsewhere.  Collective."""
        with self._peers.guard("state_dict"):
            keep_out_arguments({"keep_vars": keep_vars})
            self._control.enter("state_dict", within_s=SECONDS_FOR_ALL_TO_COME)
            devices.give_back_cached(self._comm.device)  # NCCL connects the receiver with all
            receiver = self._control.rank_by_position.index(0)
            whole = gather_params(self._flats, self._comm, receivers=[receiver])
            if self.position != receiver:
                return {} if destination is None else destination
            # A method of the model's own may take no arguments.
            given: dict[str, Any] = {}
            if prefix or destination is not None:
                given = {"destination": destination, "prefix": prefix}
            with stand_ins(self._flats, whole):
                found: dict[str, Any] = self.module.state_dict(**given)
            live = {each.untyped_storage()._cdata for each in self.module.buffers()}
            for fqn, value in found.items():
                if isinstance(value, Tensor):
                    is_live = value.untyped_storage()._cdata in live
                    found[fqn] = value.detach().to("cpu", copy=is_live)
        return found

    @property
    def host_input_bytes(self) -> int:
        """Bytes set aside in the memory of the host for inputs of this rank's units."""
        return self._runtime.slabs.nbytes

    @property
    def sent_row_bytes(self) -> int:
        """Bytes of this rank's rows as they are gathered, on the device."""
        sent = [flat.sent for flat in self._flats]
        return sum(each.numel() * each.element_size() for each in sent)

    def gather_units(
        self, wanted: Callable[[str], bool] = lambda fqn: True
    ) -> Iterator[dict[str, Tensor]]:
        """Yield whole parameters by fqn, one unit at a time, in host memory of rank zero.

        Yields {} on other ranks, and for units without a ``wanted`` parameter.  A tied
        parameter has all its names, with one tensor.  Buffers are left out.  Collective.
        """
        for unit in (*self._runtime.units, self._runtime.root):
            flats = [f for f in unit.flats if any(wanted(n) for s in f.slots for n in s.fqns)]
            with self._peers.guard(f"gathering unit {unit.fqn!r}"):
                self._control.enter("gather_units")
                receiver = self._control.rank_by_position.index(0)
                yield gather_params(flats, self._comm, receivers=[receiver])

    def load_state_dict(
        self, state_dict: Mapping[str, Any] | None, strict: bool = True, assign: bool = False
    ) -> Any:
        """Load this rank's rows of whole tensors.  Collective.

        All ranks pass the tensors, or one rank does and the others pass None.  Returns missing
        and unexpected names as torch does; raises ``ValueError`` for them if ``strict``.
        """
        with self._peers.guard("load_state_dict"):
            keep_out_arguments({"assign": assign})
            if by_themselves := loads_by_itself(self.module):
                if not state_dict:
                    raise ValueError(_BY_THEMSELVES.format(by_themselves))
                return self.module.load_state_dict(state_dict, strict)
            misfits = load_state_dict(
                self._flats,
                self.module,
                state_dict,
                comm=self._comm,
                control=self._control,
                strict=strict,
            )
        return _IncompatibleKeys(*misfits)

    def _watch_states(self, rows: RowGroup) -> None:
        """Let hooks on the state dicts of this be those on the module's, and run with them, and
        state dicts inside be whole.
        """
        inside = vars(self.module)
        shared = [k for k in inside if "state_dict" in k and k.endswith("_hooks")]
        vars(self).update({name: inside[name] for name in shared})
        watch_inside(self.module, self._flats, rows)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *found: Any
    ) -> None:
        # Called by torch's walk through a module of which this is a part.
        part = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
        assign = metadata.get("assign_to_params_buffers", False)
        misfits = self.load_state_dict(part, strict=False, assign=assign)
        for names, more in zip(found[1:3], misfits, strict=True):  # missing and unexpected
            names.extend(prefix + fqn for fqn in more)
        # The walk would go on to the parts of this and then call hooks, all of which is done.
        held = {name: vars(self)[name] for name in ("_modules", "_load_state_dict_post_hooks")}
        end = {0: lambda *_: vars(self).update(held)}
        vars(self).update(_modules={}, _load_state_dict_post_hooks=end)

    def sharded_state_dict(self) -> dict[str, RowBox]:
        """This rank's rows of every parameter, sharing memory with the model."""
        return sharded_state_dict(self._flats)

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """All ranks' ``numbers``, by position.  Collective; no accelerator waits for it."""
        with self._peers.guard("exchange"):
            lengths = [int(n) for (n,) in self._control.enter("exchange", [len(numbers)])]
            if len(set(lengths)) > 1:
                raise ValueError(
                    f"exchange: ranks pass {lengths} numbers in plan order. Pass equally many."
                )
            return self._control.exchange(numbers)

    def exchange_objects(
        self, value: Any, *, call: str = "exchange", within_s: float | None = None
    ) -> list[Any]:
        """Every rank's ``value`` (anything picklable), by position.  Collective.

        Ranks that are in a different ``call`` all raise.  Raises ``TimeoutError`` if not all
        ranks come ``within_s``.
        """
        with self._peers.guard(call):
            self._control.enter(call, within_s=within_s)
            return self._control.exchange_objects(value)

    def side_channel(self) -> Channel:
        """A channel over gloo among the ranks of this model, for a thread.  Collective."""
        with self._peers.guard("side_channel"):
            return side_channel(self._control)
