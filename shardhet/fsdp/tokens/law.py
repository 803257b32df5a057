"""The token law: what a module computes of a sequence is what it computes of pieces of it.

A try runs the module on a few tokens and on unlike pieces of them, with random parameters and
arguments in float32 or wider.  Results of the pieces have to be those of the whole, and so have
gradients.  Pieces are computed

    apart     as tiles are: nothing in a piece may depend on a token of another
    together  as by devices that share a sample: only ``F.scaled_dot_product_attention``
              sees keys and values of the others, which are those of the whole: if each piece
              is right as long as the others are, all are, from one attention to the next

What depends on how long a sequence is, as a sliding window does, does not show among few
tokens: the attention of devices that share a sample refuses masks when it is called.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.stateless import _reparametrize_module

from shardhet.fsdp.microbatch.batching import (
    BatchAxis,
    BatchingRules,
    Join,
    Layout,
    Rule,
    find_axis,
    flatten,
    storage_of,
)
from shardhet.fsdp.microbatch.layered import autocast_as, tensors_in
from shardhet.fsdp.microbatch.signature import is_plain
from shardhet.fsdp.microbatch.surroundings import restored_random_state, seed_generators
from shardhet.fsdp.probing.comparing import Cut, Refusal, are_close, fingerprint
from shardhet.fsdp.probing.gradients import GradientCut
from shardhet.fsdp.probing.module_state import attributes_of, restored_modules
from shardhet.fsdp.probing.probed_call import CallRunner, ProbedCall
from shardhet.fsdp.probing.watch import OUTSIDE, Place, Watcher
from shardhet.fsdp.sharding.unit import Casts
from shardhet.fsdp.tokens.attention import attending_by, attention
from shardhet.records.layout import Span

Made = dict[tuple[str, int], list[Tensor]]  # results, by name and call of a module inside
NUM_TOKENS, FIRST = 23, 13  # a prime number, of which no window or stride is a part
SEED = 0
ROUNDING = 64  # gradients that are zero but for so many times it, beside the largest, are


class NotByTokensError(ValueError):
    """A module is not known to compute token by token; says where and why."""


class MixesTokensError(NotByTokensError):
    """What it computes depends for one token on others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByTokens:
    """A module whose calls may be cut into pieces of their tokens."""

    rules: BatchingRules  # whose samples are tokens
    draws: bool  # whether it draws random numbers; in a try nothing is dropped
    # Bytes that its graph holds besides arguments, parameters and results, per byte of these
    # arguments and results.
    kept_ratio: float


def by_tokens(
    fqn: str,
    module: nn.Module,
    function: Callable[..., Any],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    *,
    together: bool = False,
    order: Sequence[int] | None = None,
) -> ByTokens:
    """How the module's call with such arguments, (args, kwargs), is cut into pieces of tokens.

    ``function`` is its own forward.  ``order`` says which of ``NUM_TOKENS`` tokens are in the
    first ``FIRST`` places, the first piece, and which in the others.  Raises
    ``NotByTokensError``.  The module, what it holds and random generators are left as they
    were.
    """
    call = ProbedCall.of(fqn, function, arguments)
    tensors = call.tensors
    kept = [x for x in call.leaves if not isinstance(x, Tensor) and not is_plain(x)]
    if kept:  # a KV cache, perhaps, which a try would fill
        raise NotByTokensError(f"{fqn}: it is passed a {type(kept[0]).__name__}")
    total, axes = axes_of(fqn, tensors)
    if total < 2:
        raise NotByTokensError(f"{fqn}: it is called with a single token")
    number = min(NUM_TOKENS, total)
    spans = (Span(0, first := max(1, number * FIRST // NUM_TOKENS)), Span(first, number))
    # A module whose tensors are fake, as it is when it is described, is tried on the host.
    device = torch.device("cpu") if isinstance(tensors[0], FakeTensor) else tensors[0].device
    with ExitStack() as stack:
        stack.enter_context(restored_random_state(device))
        stack.enter_context(restored_modules(module))
        stack.enter_context(Casts.off())
        seed_generators(device, SEED)
        params = _random_params(module, device)
        given = [
            _few(t, axis, number, total, device=device, as_given=together)
            for t, axis in zip(tensors, axes, strict=True)
        ]
        stack.enter_context(_reparametrize_module(module, params))
        try_out = _Try(
            fqn=fqn,
            call=call,
            module=module,
            inputs=(axes, given),
            params=[each for each in dict.fromkeys(params.values()) if each.requires_grad],
            spans=spans,
            order=torch.tensor(order or range(number), device=device),
            together=together,
        )
        try:
            return try_out.outcome()
        except (Refusal, Exception) as error:
            if isinstance(error, NotByTokensError):
                raise
            raise NotByTokensError(
                f"{fqn}: tried on a few of its tokens, it raises {type(error).__name__}: "
                f"{error}"
            ) from None


@dataclass(eq=False, kw_only=True)
class _Try:
    """One module, run whole and in pieces."""

    fqn: str
    call: ProbedCall
    module: nn.Module
    inputs: tuple[Sequence[Rule], list[Tensor]]  # of all tokens
    params: list[Tensor]
    spans: tuple[Span, Span]
    order: Tensor  # [tokens]
    together: bool
    draws: bool = False
    eps: float = 0.0
    kept: dict[int, int] = field(default_factory=dict)  # bytes of storages in the whole's graph
    made: Made = field(default_factory=dict)  # in the present run
    # Keys and values of the whole, by call of attention
    attended: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    are_alike: bool = True  # to those of pieces

    def outcome(self) -> ByTokens:
        """What has been found of the module; raises ``NotByTokensError``."""
        held = self._held()
        with self._recording():
            # A graph holds its hooks: by a method of this, which holds the graph, neither
            # would ever be freed.
            note = partial(_note, self.kept)
            with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
                whole, layout = self._run(self.inputs[1], self._attend)
            parts = [self._run_piece(span) for span in self.spans]
        try:
            rules = self._rules(whole, parts, ("", 0))
        except NotByTokensError:
            for at in whole:  # the first of the modules inside it to end that is why
                if all(at in part for part in parts):
                    self._rules(whole, parts, at)
            raise
        if not self.are_alike:
            raise MixesTokensError(f"{self.fqn}: what it attends to depends on other tokens")
        if self._held() != held:
            raise NotByTokensError(f"{self.fqn}: each of its calls changes what it holds")
        results = whole["", 0]
        self._check_gradients(results, [part["", 0] for part in parts], rules)
        outside = {storage_of(t): t.nbytes for t in (*self.inputs[1], *results)}
        kept = sum(
            self.kept[s] for s in self.kept.keys() - {*outside, *map(storage_of, self.params)}
        )
        return ByTokens(
            rules=BatchingRules(
                arguments=self.call.arguments,
                inputs=tuple(self.inputs[0]),
                results=layout,
                outputs=rules,
                is_differentiable=tuple(t.requires_grad for t in results),
            ),
            draws=self.draws,
            kept_ratio=kept / max(1, sum(outside.values())),
        )

    def _run_piece(self, span: Span) -> Made:
        """What modules return for a piece, by their names and calls."""
        tokens = self.order[span.start : span.stop].tolist()
        pieces = [
            axis.select(t, tokens, len(self.order))
            for axis, t in zip(*self.inputs, strict=True)
        ]
        of_others = iter(self.attended)
        attend = partial(self._attend_in_piece, span, of_others)
        # A device that shares samples tries what it computes alone, without the others.
        made, _ = self._run(pieces, attend if self.together else attention)
        if self.together and next(of_others, None) is not None:
            raise NotByTokensError(f"{self.fqn}: it attends more often for some tokens")
        return made

    def _run(
        self, tensors: Sequence[Tensor], attend: Callable[..., Tensor]
    ) -> tuple[Made, Layout]:
        self.made, device = {}, self.order.device
        watcher = _DropsNothing(is_cut=False, refuses_random=False)
        runner = CallRunner(
            module=self.module, watcher=watcher, device=device, has_gradients=True
        )
        with autocast_as(device.type, None), watcher, attending_by(attend):
            output = runner.run(self.call, with_graph=True, leaves=tensors)
        if watcher.is_unpredictable:
            raise NotByTokensError(f"{self.fqn}: it draws random numbers")
        self.draws |= watcher.draws
        self.eps = max(self.eps, watcher.eps)
        self.made["", 0] = tensors_in(output)
        return self.made, Layout.of(*flatten(output))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **how: Any) -> Any:
        """Torch's, of the whole."""
        self.attended.append((key, value))
        return attention(query, key, value, *args, **how)

    def _attend_in_piece(
        self,
        span: Span,
        of_others: Iterator[tuple[Tensor, Tensor]],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **how: Any,
    ) -> Tensor:
        """Attention of a piece to all, in the place of torch's."""
        if attn_mask is not None:
            raise NotByTokensError(f"{self.fqn}: its attention has a mask or bias of its own")
        if query.shape[-2] != span.numel or key.shape[-2] != span.numel:
            raise NotByTokensError(f"{self.fqn}: its attention is not among a sample's tokens")
        pair = next(of_others, None)
        if pair is None:
            raise NotByTokensError(f"{self.fqn}: it attends more often for some tokens")
        key, value = (
            self._with_others(span, own, of_all)
            for own, of_all in zip((key, value), pair, strict=True)
        )
        mine = self.order[span.start : span.stop]
        mask = self.order <= mine[:, None] if is_causal else None
        return attention(query, key, value, mask, dropout_p, **how)

    def _with_others(self, span: Span, own: Tensor, of_all: Tensor) -> Tensor:
        """A piece's rows among those of the whole, which they have to be."""
        first, expected, last = of_all.index_select(-2, self.order).split(
            [span.start, span.numel, len(self.order) - span.stop], dim=-2
        )
        self.are_alike &= are_close(own, expected, self.eps)
        return torch.cat([first, own, last], dim=-2)

    def _rules(
        self, whole: Made, parts: Sequence[Made], at: tuple[str, int]
    ) -> tuple[Rule, ...]:
        """The rule of each result of a call of a module."""
        where = f"{self.fqn}.{at[0]}" if at[0] else self.fqn
        pieces = [part.get(at, []) for part in parts]
        if any(len(piece) != len(whole[at]) for piece in pieces):
            raise NotByTokensError(f"{where}: it returns other results for other tokens")
        columns = zip(whole[at], zip(*pieces, strict=True), strict=True)
        return tuple(self._rule(where, one, each) for one, each in columns)

    def _rule(self, where: str, whole: Tensor, parts: Sequence[Tensor]) -> Rule:
        what = f"{where}: its result of shape {tuple(whole.shape)}"
        if not whole.isfinite().all():
            raise NotByTokensError(f"{what} is not finite for random parameters")
        sizes = (self.spans[0].numel, len(self.order))
        try:
            axes = find_axis(parts[0], whole, sizes)
        except ValueError:
            raise NotByTokensError(f"{what} has no row for each token") from None
        parts = [part.detach() for part in parts]
        for axis in axes:
            cut = Cut(self._in_order(axis, whole).detach(), parts, self.spans)
            if cut.follows(axis, self.eps):
                return axis
        if axes:
            raise MixesTokensError(f"{what} depends for one token on the other tokens")
        cut = Cut(whole.detach(), parts, self.spans)
        if cut.follows(Join.SHARED, self.eps) and not whole.requires_grad:
            return Join.SHARED
        eps = max(self.eps, torch.finfo(torch.float32).eps)
        if whole.dtype is not torch.bool and whole.any() and Join.SUM in cut.reductions(eps):
            return Join.SUM
        raise NotByTokensError(f"{what} is no sum over tokens and has no row for each")

    def _in_order(self, rule: Rule, whole: Tensor) -> Tensor:
        """With its tokens in the order of pieces."""
        return rule.select(whole, self.order.tolist(), len(self.order))

    def _check_gradients(
        self, whole: Sequence[Tensor], parts: Any, rules: Sequence[Rule]
    ) -> None:
        sums: list[Tensor] = [torch.zeros((), device=self.order.device) for _ in (0, 1)]
        for one, pieces, rule in zip(whole, zip(*parts, strict=True), rules, strict=True):
            if not one.requires_grad:
                continue
            in_order = self._in_order(rule, one)
            factors = torch.randn_like(in_order)
            sums[0] = sums[0] + (in_order * factors).sum()
            for part, span in zip(pieces, self.spans, strict=True):
                of_part = rule.narrow(factors, span, len(self.order))
                sums[1] = sums[1] + (part * of_part).sum()
        leaves = [t for t in (*self.params, *self.inputs[1]) if t.requires_grad]
        if not leaves or not sums[0].requires_grad:
            return
        of_whole, of_parts = (
            torch.autograd.grad(
                each, leaves, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for each in sums
        )
        eps = max(self.eps, torch.finfo(leaves[0].dtype).eps, 1e-12)
        found = GradientCut(
            dict(enumerate(of_whole)),
            [dict(enumerate(of_parts))],
            [Span(0, 1)],
            lambda _: Join.SHARED,
            bar=eps**0.5,
            noise=ROUNDING * eps**0.5,
        )
        if not (found.add_up() and all(each.isfinite().all() for each in of_whole)):
            raise NotByTokensError(f"{self.fqn}: its gradients are no sums over its tokens")

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """A context in which a run keeps what modules inside this one return."""

        def record(fqn: str) -> Callable[..., None]:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                number = sum(name == fqn for name, _ in self.made)  # of its earlier calls
                self.made[fqn, number] = tensors_in(output)

            return hook

        with ExitStack() as stack:
            for fqn, each in self.module.named_modules():
                if fqn:
                    stack.callback(each.register_forward_hook(record(fqn)).remove)
            yield

    def _held(self) -> dict[Any, Any]:
        """Fingerprints of attributes, and versions of buffers."""
        found: dict[Any, Any] = {
            at: fingerprint(value) for at, _, value in attributes_of(self.module)
        }
        return found | {name: each._version for name, each in self.module.named_buffers()}


def _note(kept: dict[int, int], saved: Tensor) -> Tensor:
    kept[storage_of(saved)] = saved.nbytes
    return saved


class _DropsNothing(Watcher):
    """Leaves dropout out, and notes draws and narrow dtypes; tensors may be from anywhere."""

    def _check(self, tensor: Tensor, used_by: str) -> Place | None:
        return OUTSIDE


def axes_of(fqn: str, tensors: Sequence[Tensor]) -> tuple[int, list[Rule]]:
    """The number of tokens, and where tensors have them."""
    first = next((t for t in tensors if t.dim() > 1), None)
    if first is None:
        raise NotByTokensError(f"{fqn}: no argument has a dimension of tokens")
    number = first.shape[1]
    found: list[Rule] = []
    for tensor in tensors:
        dims = sorted(range(tensor.dim()), key=lambda dim: (dim == 0, dim))
        fitting = [dim for dim in dims if tensor.shape[dim] == number]
        found.append(BatchAxis(fitting[0]) if fitting else Join.SHARED)
    return number, found


def _few(
    tensor: Tensor,
    axis: Rule,
    number: int,
    total: int,
    *,
    device: torch.device,
    as_given: bool,
) -> Tensor:
    """A random argument for fewer tokens; integers are from among the argument's own."""
    if tensor.is_floating_point():
        shape = axis.shape(tensor.shape, number)
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        return torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    if not isinstance(axis, BatchAxis):
        return tensor
    if isinstance(tensor, FakeTensor):
        return torch.zeros(axis.shape(tensor.shape, number), dtype=tensor.dtype, device=device)
    few = axis.narrow(tensor, Span(0, number), total)
    # Positions follow on each other; labels may be of a prompt that is left out of the loss.
    if not tensor.numel() or (as_given and bool((few != few.flatten()[0]).any())):
        return few
    values = tensor.unique()
    if values[-1] < 0:  # labels that are all left out: a loss of nothing shows nothing
        values = values.new_zeros(1)
    return values[torch.randint(len(values), few.shape, device=tensor.device)]


def _random_params(module: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Random parameters, and copies of buffers.  Layers that are alike have the same ones."""
    by_id: dict[int, Tensor] = {}
    by_kind: dict[Any, Tensor] = {}
    for name, held in module.named_parameters():
        kind = name.split(".")[-2:], held.shape, held.dtype, held.requires_grad
        if str(kind) not in by_kind:
            by_kind[str(kind)] = _random_like(held, device)
        by_id[id(held)] = by_kind[str(kind)]
    names = module.named_parameters(remove_duplicate=False)
    copies = {name: _random_like(each, device) for name, each in module.named_buffers()}
    return {name: by_id[id(each)] for name, each in names} | copies


def _random_like(held: Tensor, device: torch.device) -> Tensor:
    """A random parameter of its shape, in float32 or wider; a copy of a buffer."""
    if isinstance(held, FakeTensor) and not isinstance(held, nn.Parameter):
        return torch.zeros(held.shape, dtype=held.dtype, device=device)
    if not held.is_floating_point():
        return held.detach().clone()
    dtype = torch.promote_types(held.dtype, torch.float32)
    if not isinstance(held, nn.Parameter):
        return held.detach().to(dtype, copy=True)
    made = torch.randn(held.shape, dtype=dtype, device=device)
    made = made * held.shape[-1] ** -0.5 if held.dim() > 1 else 1 + 0.3 * made
    return made.requires_grad_(held.requires_grad)
