"""Watches every operation of a probe for tensors that bypass arguments and results of units.

Each tensor that depends on the model's inputs or parameters belongs to the *place* where it was
made: outside of units, or in one call of a unit.

    outside        x = embed(tokens)      x and what is computed from it outside of units
      call 1         h = norm(x)          may use the arguments of the call, tensors made by the
                     y = h @ w              same call, and tensors from before the forward
    outside        y                      the results of a call belong to the outside again

An operation that uses a tensor of another place would see only one microbatch of it instead of
the whole batch, or would lose its gradient; it is refused.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from shardhet.fsdp.microbatch.batching import storage_of
from shardhet.fsdp.microbatch.modes import (
    EagerMode,
    FunctionMode,
    tensors_among,
    written_by,
)
from shardhet.fsdp.params.optimizer_check import is_in_memory_given_up
from shardhet.fsdp.probing.comparing import Law, Refusal
from shardhet.fsdp.stages.flow import Flow


class Place(NamedTuple):
    """Where a tensor is made."""

    number: int  # of the call of a unit; another one for each
    fqn: str

    def __str__(self) -> str:
        return f"unit {self.fqn!r}" if self.number else "code outside of units"


OUTSIDE = Place(0, "")

_NARROW = (torch.float16, torch.bfloat16)

# These use only dtype, device and shape of their tensor.
FACTORIES = frozenset(
    ("new_empty", "new_full", "new_ones", "new_zeros", "empty_like", "zeros_like", "ones_like",
     "full_like", "new_empty_strided", "sym_size", "sym_stride")
)  # fmt: skip
# Their kernels may sum in another order for another number of samples.
_SUMS = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear", "convolution", "sum",
     "mean", "nll_loss_forward", "nll_loss2d_forward")
)  # fmt: skip
# Replace random numbers: in a probe a sample's values must not depend on the other samples.
_CONSTANTS = {"bernoulli_": 1.0, "uniform_": 0.5, "normal_": 0.5, "random_": 0.0,
              "exponential_": 1.0}  # fmt: skip

_PREDICTED: dict[str, Callable[..., Tensor]] = {
    "bernoulli": lambda p, *_: torch.ones_like(p),
    "multinomial": lambda p, n, *_: p.argmax(-1, keepdim=True).repeat_interleave(n, -1),
}
# Arguments of random operations that are 0, or False, while a model is probed; that of RReLU
# is the last.
_DROPPING = ("dropout_p", "dropout", "training")


class StaysUnsharded(BaseException):
    """A unit's parameter is used while the unit is not called, so it has to stay unsharded."""

    def __init__(self, unit: int) -> None:
        super().__init__(unit)
        self.unit = unit


class MadeRows:
    """Tensors that were made from arguments with rows, of one sample each or ragged."""

    def __init__(self) -> None:
        self._of_samples = WeakIdKeyDictionary()  # tensor -> whether from any of the former

    def begin(self, inputs: Sequence[tuple[Tensor, bool | None]]) -> None:
        """Begin a forward with these, as ``give`` says of each; unless any rows are ragged
        nothing has to be known.
        """
        self._of_samples.clear()
        for tensor, of_samples in inputs if any(of is False for _, of in inputs) else ():
            self.give([tensor], of_samples=of_samples)

    def give(self, tensors: Iterable[Tensor], *, of_samples: bool | None) -> None:
        """Note that these have rows of samples, or else only ragged ones; None for neither."""
        for each in tensors if of_samples is not None else ():
            self._of_samples[each] = of_samples
            if each._base is not None:  # may have been written through a view
                self._of_samples[each._base] = of_samples

    def has_ragged(self, tensors: Iterable[Tensor]) -> bool:
        """Whether any of them was made from ragged arguments alone."""
        return any(self._of_samples.get(each) is False for each in tensors)

    def pass_on(self, given: Any, made: Any) -> None:
        """Note that an operation made these from what it was given."""
        if not len(self._of_samples):
            return
        found = [self._of_samples[x] for x in tensors_among(given) if x in self._of_samples]
        if found:
            self.give(tensors_among(made), of_samples=any(found))

    def pass_through(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Note that a unit made these: ragged rows if any that it was given are."""
        if self.has_ragged(given):
            self.give(made, of_samples=False)
        else:
            self.pass_on(given, made)


class Operators(FunctionMode):
    """Refuses operators that call functions of the program, which no ``Watcher`` follows."""

    def run(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # torch.func calls every autograd.Function by one of them, which runs its operations.
        if isinstance(func, HigherOrderOperator) and func.name() != "custom_function_call":
            raise Refusal(
                ValueError(
                    f"{func.name()}: what it calls, and which samples that reads, cannot be "
                    "followed when the model is tried on a few samples. Use operations on "
                    "tensors; instead of flex_attention, F.scaled_dot_product_attention with a "
                    "mask (attn_implementation='sdpa' in transformers)."
                )
            )
        return func(*args, **kwargs)


class Watcher(EagerMode):
    """Tracks where tensors are made while it is active; replaces random numbers."""

    def __init__(self, *, is_cut: bool, refuses_random: bool = True) -> None:
        super().__init__()
        self._is_cut = is_cut  # whether a batch with gradients is cut at all
        self._refuses_random = refuses_random  # outside of units
        self.is_unpredictable = False  # random numbers were drawn that cannot be fixed
        self.draws = False  # whether a call has drawn random numbers, or dropped any
        self.drawn = ""  # where and how, whenever it was
        self.eps = 0.0  # of the narrowest dtype that anything was computed in
        self.rows: Mapping[int, int] = {}  # indices of units, by id of a sharded parameter
        self.gathered: Mapping[int, int] = {}  # those that do not stay, by unsharded parameter
        self.params: frozenset[int] = frozenset()  # ids of the model's unsharded parameters
        self.storages: Callable[[], set[int]] = set  # those that hold parameters
        self.flow: Flow | None = None  # of the results of units, if it is asked for
        # Results of units that share memory with their other results or arguments: units by id.
        self.aliased: dict[int, tuple[str, Tensor]] = {}
        self._place = OUTSIDE
        self._num_calls = 0
        self._is_paused = False
        self._made_at = WeakIdKeyDictionary()  # tensor -> place
        self.made_rows = MadeRows()
        self.drawn_one, self.has_drawn_one = 0.5, False  # a number that is drawn outside
        self._bounded = WeakIdKeyDictionary()  # single numbers with a least or largest value
        self._allowed: set[int] = set()  # storages that the call was given

    @contextmanager
    def call(self, unit_fqn: str, arguments: Sequence[Tensor]) -> Iterator[None]:
        """A context for one call of a unit with these tensors."""
        before = (self._place, self._allowed, self._is_paused)
        self._num_calls += 1
        self._place, self._is_paused = Place(self._num_calls, unit_fqn), False
        self._allowed = set(map(storage_of, arguments))
        self.give(arguments)
        try:
            yield
        finally:
            self._place, self._allowed, self._is_paused = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which only calls of units are watched."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def give(self, tensors: Sequence[Tensor]) -> None:
        """Assign ``tensors`` to the current place."""
        for tensor in tensors:
            self._made_at[tensor] = self._place

    def check_arguments(self, tensors: Sequence[Tensor]) -> None:
        """Raise if a unit is passed a parameter of a unit that is not being called."""
        for tensor in tensors:
            self._check_rows(tensor)

    def check_returned(self, tensors: Sequence[Tensor]) -> None:
        """Raise if the model returns a tensor that a unit has made but not returned."""
        for tensor in tensors:
            self._check(tensor, "the model's output")
        self.check_counts("model(...)", tensors)

    def check_counts(self, who: str, tensors: Sequence[Tensor]) -> None:
        """Raise if ``who`` returns a count of tokens that is, for instance, at least 1."""
        bounded = [each for each in tensors if each in self._bounded]
        if self._is_cut and not all(each.requires_grad for each in bounded):
            raise Law.ADDS_UP.refusal(who + _BOUNDED)

    def read(self, tensor: Tensor) -> None:
        """Note that the program reads the tensor's values by no operation."""
        if self.flow is not None and self._place == OUTSIDE and not self._is_paused:
            self.flow.read(tensor)

    def hook(self, tensor: Tensor) -> None:
        """Note that the program gives the tensor a hook."""
        if self.flow is not None and self._place == OUTSIDE and not self._is_paused:
            self.flow.alter(tensor)

    def run(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the operation; check the places of its inputs and note that of its result."""
        if self._is_paused:
            return func(*args, **kwargs)
        name = func.__name__.split(".")[0]
        for each in written_by(func, args, kwargs):
            self._check_write(name, each)
        if self._is_cut and name in _LOOKUPS and _divides_by_counts(func, args, kwargs):
            raise Law.GRADIENTS.refusal(
                f"{self._place} looks rows of an embedding up with scale_grad_by_freq=True, "
                "which divides the gradient of each by how often it is in the batch"
            )
        depends = False
        if name not in FACTORIES:
            for each in tensors_among((args, kwargs)):
                place = self._check(each, name)
                depends |= place is not None or isinstance(each, nn.Parameter)
        result = self._predictably(func, name, args, kwargs)
        self.made_rows.pass_on((args, kwargs), result)
        if self.flow is not None and self._place == OUTSIDE and name not in FACTORIES:
            self.flow.note(func, (args, kwargs), result)
        if depends:
            for each in tensors_among(result):
                self._note(each)
                is_copy = name in _COPIES and args[0] in self._bounded
                if not each.dim() and (is_copy or _is_bound(name, each)):
                    self._bounded[each] = True
                if each.is_floating_point() or each.is_complex():
                    self.eps = max(self.eps, torch.finfo(each.dtype).eps)
        return result

    def _note(self, tensor: Tensor) -> None:
        self._made_at.setdefault(tensor, self._place)
        if tensor._base is not None:  # may have been written through a view
            self._made_at.setdefault(tensor._base, self._place)

    def _check_rows(self, tensor: Tensor) -> None:
        if id(tensor) in self.rows:
            raise StaysUnsharded(self.rows[id(tensor)])
        if self._place == OUTSIDE and id(tensor) in self.gathered:  # of the unit called last
            raise StaysUnsharded(self.gathered[id(tensor)])

    def _check_write(self, name: str, written: Tensor) -> None:
        """Refuse to write parameters, which would be written on gathered copies only."""
        if self._place == OUTSIDE:
            self._check_result(name, written)
        is_strided = written.layout is torch.strided
        if is_strided and written.untyped_storage()._cdata in self.storages():
            raise Law.READ.refusal(
                f"{self._place} writes to a parameter ({name} of a tensor of shape "
                f"{tuple(written.shape)})",
                RuntimeError,
            )

    def _check_result(self, name: str, written: Tensor) -> None:
        """Refuse to write to a result of a unit that has to change another tensor too."""
        if self.flow is not None:
            self.flow.alter(written)
        fqn, _ = self.aliased.get(storage_of(written), (None, None))
        if fqn is not None:
            raise Law.READ.refusal(
                f"code outside of units writes ({name}) to a tensor of shape "
                f"{tuple(written.shape)} that unit {fqn!r} has returned, which is one of its "
                "arguments, or a view of one or of another result",
                RuntimeError,
            )

    def _check(self, tensor: Tensor, used_by: str) -> Place | None:
        """Where the tensor was made, if in this forward; raises if it may not be used here."""
        self._check_rows(tensor)
        place = self._made_at.get(tensor)
        is_own = id(tensor) in self.params
        is_foreign = tensor.requires_grad and not (is_own or _is_of_others(tensor))
        if place is None and (is_foreign or is_in_memory_given_up(tensor)):
            what = "requires a gradient" if tensor.requires_grad else "is the data of one"
            raise Law.PASSED.refusal(
                f"{self._place} uses a tensor of shape {tuple(tensor.shape)} that {what} (in "
                f"{used_by}) but is neither a parameter of the model nor one of its arguments: "
                "kept from before wrapping, or of another model"
            )
        if place is None or place == self._place or storage_of(tensor) in self._allowed:
            return place
        what = f"a tensor of shape {tuple(tensor.shape)}"
        if self._place != OUTSIDE:
            raise Law.PASSED.refusal(
                f"{self._place} uses {what} that {place} made in this forward and that is not "
                f"among its arguments (in {used_by})"
            )
        raise Law.PASSED.refusal(
            f"{place}: {what} that it made but did not return is used outside of it (in "
            f"{used_by})"
        )

    def _predictably(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not _is_random(func):
            if self._place == OUTSIDE and name in _SUMS:
                return _rounded_sum(func, args, kwargs)
            return func(*args, **kwargs)
        if self.flow is not None and self._place != OUTSIDE:
            self.flow.draw()
        arguments = func._schema.arguments  # type: ignore[attr-defined]
        schema = [argument.name for argument in arguments]
        if any(each in schema for each in _DROPPING):
            return self._without_dropout(func, schema, args, kwargs)
        self.draws = True
        if self._place == OUTSIDE and name == "rand" and not args[0]:
            self.has_drawn_one = True
            return torch.full((), self.drawn_one)
        self._check_random(name)
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name in _CONSTANTS:
            return args[0].fill_(_CONSTANTS[name])
        if name in ("rand", "randn", "rand_like", "randn_like", "randint", "randint_like"):
            return func(*args, **kwargs).fill_(0.5)
        if name in _PREDICTED:
            return _PREDICTED[name](*args)
        self.is_unpredictable = True
        self.drawn = f"{self._place} draws random numbers ({name})"
        return func(*args, **kwargs)

    def _check_random(self, operation: str) -> None:
        if self._place == OUTSIDE and self._refuses_random:
            raise Law.REPEATS.refusal(
                f"the model draws random numbers outside of units ({operation}), once for all "
                "samples of a rank"
            )

    def _without_dropout(
        self,
        func: Callable[..., Any],
        schema: Sequence[str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        index = next(schema.index(name) for name in _DROPPING if name in schema)
        given = args[index] if index < len(args) else kwargs.get(schema[index], 0.0)
        self.draws |= bool(given)
        if given:
            self._check_random(func.__name__)
        if index < len(args):
            return func(*args[:index], type(given)(0), *args[index + 1 :], **kwargs)
        return func(*args, **(kwargs | ({schema[index]: 0.0} if given else {})))


_BOUNDS = frozenset({"clamp", "clamp_min", "clamp_max", "maximum", "minimum", "fmax", "fmin"})
# These give the same number.
_COPIES = frozenset(("_to_copy", "clone", "detach", "alias", "view", "squeeze"))
_BOUNDED = " returns a single number that is kept within bounds (clamp, maximum, where)"
_LOOKUPS = frozenset(("embedding", "_embedding_bag"))


@cache  # to look through the tags takes as long as most operations
def _is_random(func: Callable[..., Any]) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def _divides_by_counts(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether gradients of a table are divided by how often the batch looks a row up."""
    names = [argument.name for argument in func._schema.arguments]  # type: ignore[attr-defined]
    given = dict(zip(names, args, strict=False)) | kwargs
    return bool(given.get("scale_grad_by_freq") and args[0].requires_grad)


def _is_bound(name: str, result: Tensor) -> bool:
    """Whether an operation keeps a number within bounds."""
    if name == "where":  # of a count; others may be a ratio, which is 0 / 0
        return not result.is_floating_point()
    return name in _BOUNDS


def _rounded_sum(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The operation in float32, rounded to its own dtype if that is narrower.

    So a sample's values are the same, bit by bit, whichever other samples are in the batch.  A
    single number, such as a loss, is not rounded: it is compared more strictly.
    """
    narrow = {t.dtype for t in tensors_among((args, kwargs)) if t.dtype in _NARROW}
    if len(narrow) != 1 or kwargs.get("dtype") is not None:
        return func(*args, **kwargs)
    [dtype] = narrow

    def widened(leaf: Any) -> Any:
        return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype == dtype else leaf

    def rounded(leaf: Any) -> Any:
        is_wide = isinstance(leaf, Tensor) and leaf.dtype == torch.float32 and leaf.dim()
        return leaf.to(dtype) if is_wide else leaf

    args, kwargs = tree_map(widened, (args, kwargs))
    return tree_map(rounded, func(*args, **kwargs))


def _is_of_others(tensor: Tensor) -> bool:
    """Whether it is another model's parameter, where no gradients are computed."""
    return tensor.is_leaf and not torch.is_grad_enabled()
