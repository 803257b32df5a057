"""Refuses optimizers whose step on rows differs from their step on whole parameters.

A rank's optimizer holds rows of each parameter, so it must work element by element, or at least
row by row; or parameter by parameter, where each is whole on one rank (``whole_matrices`` of
the plan).  Torch calls ``look_at`` before every step of every optimizer.  An optimizer that
holds parameters of a HetFSDP is checked once:

    torch's element-wise optimizers            pass
    torch's that need whole parameters         pass if none of theirs is cut
    torch's that are known to need more        are refused
    any other class                            is tried on a small problem with a copy, of all
                                               parameters and of some of them, or cut into
                                               rows; refused if results differ or if it cannot
                                               be copied

One that passes because no parameter is cut gets only those that this rank has
(``takes_whole``).

An optimizer that holds parameters from before wrapping is refused: it would train nothing.

From then on its ``state_dict()`` says of which rows it is, and a state of other rows is
refused, when it is loaded or at the first step after it.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn, optim
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from shardhet.comm.peers import Peers
from shardhet.fsdp.microbatch.modes import FunctionTensor
from shardhet.fsdp.microbatch.surroundings import restored_random_state
from shardhet.fsdp.params.optimizer_trial import Trial
from shardhet.fsdp.params.row_group import Rows, ShardGroup

ELEMENT_WISE = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
NEEDS_WHOLE = {
    "Adafactor": "averages over the rows and columns of whole matrices",
    "Muon": "orthogonalises whole matrices",
}
NEEDS_MORE = {
    "LBFGS": "takes inner products over all parameters",
    "SparseAdam": "takes sparse gradients",
    "ZeroRedundancyOptimizer": "shards parameters over ranks, as HetFSDP has done already",
}
INSTEAD = (
    "Use one that works element by element (AdamW, SGD, ...), or train these parameters "
    "with it in a model of their own."
)
STORE_WHOLE = (
    "Use one that works element by element (AdamW, SGD, ...), or give it only parameters that "
    "are stored whole: those of blocks, under a plan with whole_matrices=True."
)
LOAD = (
    "shardhet.checkpoint.load(model, optimizer, path) gives each rank its rows of what "
    "shardhet.checkpoint.save has saved, under any plan or in one process."
)
NOT_SEEN = -1, False  # in place of what was seen
ROWS = "shardhet_rows"  # an option of each group of a state dict

_rows_by_param = WeakIdKeyDictionary()  # of all models: what returns their Rows
_given_up = WeakIdKeyDictionary()  # parameters from before wrapping: their fqn and peers
_memories: dict[int, StorageWeakRef] = {}  # of such that were trainable, by address
# How many, and whether the step got a closure.
_params_seen: "WeakKeyDictionary[optim.Optimizer, tuple[int, bool]]" = WeakKeyDictionary()
_groups: "WeakKeyDictionary[optim.Optimizer, list[ShardGroup]]" = WeakKeyDictionary()
_on_whole: "WeakSet[optim.Optimizer]" = WeakSet()


def know(param: nn.Parameter, rows: Callable[[], Rows]) -> None:
    """Register a parameter as rows of a HetFSDP, with what says which rows are here."""
    _rows_by_param[param] = rows


def rows_of(param: Tensor) -> Rows:
    """Which rows of it are here, if it has been registered."""
    rows: Rows = _rows_by_param[param]()
    return rows


def put_in_front(kind: type, param: nn.Parameter) -> None:
    """Let calls on ``param`` go to ``kind``, a FunctionTensor, unless its class gets them."""
    own = type(param)
    if own.__torch_function__ is nn.Parameter.__torch_function__:
        param.__class__ = _before(kind, own)


@cache
def _before(kind: type, own: type) -> Any:
    return type(own.__name__, (kind, own), {})


class StaleParameter(FunctionTensor):
    """A trainable parameter from before wrapping, which every use refuses."""

    @classmethod
    def _call(cls, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
        fqn, peers = _given_up[given]
        with peers.fail_together("a parameter from before wrapping"):
            raise ValueError(
                f"{fqn}: this parameter was kept from before wrapping the model, which does "
                "not use it any more. List parameters, and make optimizers, after wrapping: "
                "model.parameters(); in forward, read one from its module."
            )
        raise AssertionError("not reached")


class OriginalParams:
    """The parameters of a plain module, which a HetFSDP then copies; keeps none alive."""

    def __init__(self, module: nn.Module) -> None:
        self.by_fqn = {fqn: ref(param) for fqn, param in module.named_parameters()}
        of_buffers = {buffer.untyped_storage()._cdata for buffer in module.buffers()}
        storages = [p.untyped_storage() for p in module.parameters() if p.requires_grad]
        self._memories = [StorageWeakRef(s) for s in storages if s._cdata not in of_buffers]

    def give_up(self, peers: Peers) -> None:
        """Register those that somebody has kept, or their data: training them has no effect."""
        for fqn, at in self.by_fqn.items():
            if (param := at()) is not None and param.requires_grad:
                _given_up[param] = fqn, peers
                put_in_front(StaleParameter, param)
        alive = [m for m in (*_memories.values(), *self._memories) if not m.expired()]
        _memories.clear()
        _memories.update({memory.cdata: memory for memory in alive})


def forget_states() -> None:
    """Look at every optimizer again before its next step: rows have moved."""
    for optimizer in list(_params_seen):
        _params_seen[optimizer] = NOT_SEEN


def takes_whole(optimizer: optim.Optimizer) -> bool:
    """Whether it passed because each of its parameters is whole on one rank."""
    return optimizer in _on_whole


def rows_among(params: Sequence[Tensor]) -> list[Rows]:
    """Of those among them that have been registered."""
    return [rows_of(param) for param in params if param in _rows_by_param]


def are_rows(tensor: Tensor) -> bool:
    """Whether they are rows of a HetFSDP, of which others are elsewhere."""
    return tensor in _rows_by_param


def groups_of(optimizer: optim.Optimizer) -> list[ShardGroup]:
    """Those of the models whose rows it holds."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return list({id(rows.group): rows.group for rows in rows_among(params)}.values())


def is_in_memory_given_up(tensor: Tensor) -> bool:
    """Whether it lies where a trainable parameter was that a HetFSDP has copied."""
    is_strided = bool(_memories) and tensor.layout is torch.strided
    return is_strided and tensor.untyped_storage()._cdata in _memories


def look_at(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise on every rank if ``optimizer`` cannot train the HetFSDP whose rows it holds."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    has_closure = any(map(callable, (*args[1:], *kwargs.values())))
    is_seen = _params_seen.get(optimizer) == (len(params), has_closure)
    groups = _groups[optimizer] if is_seen else groups_of(optimizer)
    for group in groups:
        group.check_is_between_steps(params)
    if is_seen:
        return
    if groups:
        with groups[0].peers.fail_together("optimizer.step"):
            _check_rows(optimizer)
            _check(optimizer, has_closure=has_closure)
        if optimizer not in _params_seen:
            if "_optimizer_state_dict_post_hooks" not in vars(optimizer):
                optim.Optimizer.__setstate__(optimizer, {})  # without `__init__` of torch
            optimizer.register_state_dict_post_hook(_mark_rows)
            optimizer.register_load_state_dict_post_hook(_check_loaded)
    _params_seen[optimizer], _groups[optimizer] = (len(params), has_closure), groups


register_optimizer_step_pre_hook(look_at)


def _name(optimizer: optim.Optimizer) -> str:
    return f"optimizer {type(optimizer).__name__}"


def count_moments(optimizer: optim.Optimizer) -> int:
    """How many states of the size of a parameter it keeps; 0 if it cannot be tried."""
    try:
        with restored_random_state(torch.device("cpu")):
            return Trial(optimizer).num_moments()
    except Exception:  # _check says of what cannot be tried
        return 0


def _check(optimizer: optim.Optimizer, *, has_closure: bool) -> None:
    if type(optimizer) in ELEMENT_WISE:
        _check_state(optimizer)
        return
    _on_whole.discard(optimizer)
    params = (param for group in optimizer.param_groups for param in group["params"])
    rows = (rows_of(param) for param in params if param in _rows_by_param)
    cut = next((each.fqn for each in rows if each.is_cut), None)
    for kind in type(optimizer).__mro__:
        is_torchs = kind.__module__.startswith("torch.")
        if is_torchs and kind.__name__ in NEEDS_MORE:
            _refuse(optimizer, NEEDS_MORE[kind.__name__], INSTEAD)
        if is_torchs and kind.__name__ in NEEDS_WHOLE and cut is not None:
            _refuse(optimizer, f"{NEEDS_WHOLE[kind.__name__]}, and {cut} is cut into rows")
    is_known = type(optimizer) in (optim.Adafactor, optim.Muon)
    if cut is None and (is_known or _why_not(optimizer, has_closure, by_rows=False) is None):
        _on_whole.add(optimizer)
    elif (why := _why_not(optimizer, has_closure, by_rows=True)) is not None:
        _refuse(optimizer, why)


def _why_not(optimizer: optim.Optimizer, has_closure: bool, *, by_rows: bool) -> str | None:
    """Why a rank's part of the parameters does not suffice, as a trial shows; or None."""
    try:
        with restored_random_state(optimizer.param_groups[0]["params"][0].device):
            error = Trial(optimizer, has_closure=has_closure, by_rows=by_rows).error()
    except Exception as problem:
        return (
            f"could not be tried on a copy ({type(problem).__name__}: {problem}), which would "
            "show whether it needs more than rows"
        )
    if error > 1.0:
        return "updates rows of a parameter differently than the whole parameter"
    return None


def _check_state(optimizer: optim.Optimizer) -> None:
    """Raise if the state with which an element-wise optimizer begins is of other rows."""
    for param, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != param.shape:
                raise ValueError(
                    f"{_name(optimizer)}: its {name} has shape {tuple(value.shape)} for a "
                    f"parameter of which this rank has {tuple(param.shape)}. The state is that "
                    "of one process, or of another plan or rank; or the model has got another "
                    "plan without this optimizer (redistribute(model, [one, other], plan) "
                    f"moves the states of all). {LOAD}"
                )


def _rows_of(group: dict[str, Any]) -> list[list[int]]:
    return [[rows.here.start, rows.here.stop] for rows in rows_among(group["params"])]


def _mark_rows(optimizer: optim.Optimizer, state_dict: dict[str, Any]) -> None:
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        saved[ROWS] = _rows_of(group)


def _check_loaded(optimizer: optim.Optimizer) -> None:
    with groups_of(optimizer)[0].peers.fail_together("optimizer.load_state_dict"):
        _check_rows(optimizer)


def _check_rows(optimizer: optim.Optimizer) -> None:
    """Raise if a state that was loaded says that it is of other rows than this rank's."""
    for number, group in enumerate(optimizer.param_groups):
        found, here = group.pop(ROWS, None), _rows_of(group)
        if found not in (None, here):
            raise ValueError(
                f"{_name(optimizer)}: the state that was loaded is of rows {found} of the "
                f"parameters of group {number}, and this rank has {here}: it was saved by "
                f"another rank, or under another plan. {LOAD}"
            )


def _refuse(optimizer: optim.Optimizer, why: str, instead: str = STORE_WHOLE) -> NoReturn:
    raise ValueError(
        f"{_name(optimizer)} {why}, but a rank of a HetFSDP has only rows of a parameter. "
        f"{instead}"
    )
