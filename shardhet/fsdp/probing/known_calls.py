"""Rules of a model's calls: found once for each kind of call, then looked up."""

import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from shardhet.comm.channel import Channel
from shardhet.fsdp.microbatch.batching import BatchingRules, Layout, flatten
from shardhet.fsdp.microbatch.joining import check_fits
from shardhet.fsdp.microbatch.signature import CHOOSING, ModelCall, as_real, choice_of
from shardhet.fsdp.probing.attempt import RunModule
from shardhet.fsdp.probing.comparing import Law
from shardhet.fsdp.probing.module_state import Edits, Writes, choosing_attributes
from shardhet.fsdp.probing.probe import CallKey
from shardhet.fsdp.probing.probed_call import ProbedCall
from shardhet.fsdp.probing.prober import Findings, Prober
from shardhet.fsdp.sharding.unit import UnitModule

_UNLIKE = (
    "model.backward: the program has written buffers or numbers of modules between forwards, "
    "and they are not the same on all ranks: {}. Write the same values on every rank, outside "
    "of `if rank == 0`; what is this rank's own belongs outside of the model."
)
_KEEPS = (
    "model.backward: a buffer or number that this forward has changed is not that of one "
    "process with all samples: {}. It follows the largest value of the samples so far "
    "(rope_type='dynamic'), perhaps, and each rank, round or microbatch has its own. Compute "
    "it from all samples before the step, or from each sample."
)

MOST_UNUSED = 64  # findings of calls that cannot come again, as with hooks that are gone
UNKNOWN = -1  # the index of findings that do not exist yet


def digest_of(module: nn.Module, fqns: Set[str]) -> float:
    """A number for the values of these buffers and numbers; 0 for none."""
    digest = 0
    for fqn in sorted(fqns):
        inside, _, name = fqn.rpartition(".")
        content, value = b"", getattr(module.get_submodule(inside), name, None)
        if isinstance(value, Tensor):
            values = as_real(value.detach()).to("cpu").reshape(-1)
            content = values.view(torch.uint8).numpy().tobytes()
            value = (value.shape, value.dtype)
        digest = zlib.crc32(f"{fqn} {value}".encode() + content, digest)
    return float(digest)


class KnownCalls:
    """The findings of all probes, in the same order on every rank."""

    function: Callable[..., Any] | None = None  # see ``HetFSDP.computing``

    def __init__(self, prober: Prober, control: Channel, *, in_stages: bool) -> None:
        """``in_stages``: findings are for one shape of samples, which stages hand over."""
        self._prober = prober
        self._control = control
        self._in_stages = in_stages
        modules = prober.module.modules()
        self._dropouts = [each for each in modules if isinstance(each, _DropoutNd)]
        self._findings: dict[int, Findings] = {}
        self._num_found, self._most = 0, MOST_UNUSED
        self._index_by_key: dict[Hashable, int] = {}
        self._choices = choosing_attributes(prober.module)
        self._edits = Edits(prober.module)

        # Buffers and numbers that the program has written since the last backward, and those
        # that forwards have, unforeseen; whether after others of the step had computed.
        self._by_program: frozenset[str] = frozenset()
        self._by_forward: frozenset[str] = frozenset()
        self._is_late = False
        self._counted: set[str] = set()  # numbers that forwards change, which is no program's
        self._writes = Writes(prober.module)

        # Of the forward in progress
        self._index = UNKNOWN
        self._call: Any = None  # that one
        self._num_calls: Counter[str] = Counter()  # by module

    @property
    def current(self) -> Findings:
        """The findings for the forward in progress."""
        return self._findings[self._index]

    @property
    def latest(self) -> int:
        """The index of the findings of the last forward."""
        return self._index

    def index_of(self, call: ModelCall, *, is_training: bool, splits: bool) -> int:
        """The index of this rank's findings for such a call; UNKNOWN if it has none."""
        key = self._key_of(call, is_training=is_training, splits=splits)
        return self._index_by_key.get(key, UNKNOWN)

    def _key_of(self, call: ModelCall, *, is_training: bool, splits: bool) -> Hashable:
        """What calls have in common that the same findings are for."""
        if self._edits.take():
            self._look_anew()
            self._index_by_key.clear()
            self._choices = choosing_attributes(self._prober.module)
        values = [held.get(name) for held, name in self._choices]
        chosen = tuple([x if isinstance(x, CHOOSING) else choice_of(x) for x in values])
        key = (call.key, torch.is_grad_enabled(), is_training, splits, chosen)
        shapes: Any = None
        if self._in_stages:
            shapes = call.lengths, *(bool(each.p) for each in self._dropouts)
        return (*key, self.function, shapes)

    def probe(
        self, call: ModelCall, run_module: RunModule, *, is_training: bool, splits: bool
    ) -> int:
        """Run a probe on all ranks; the index of what it finds.  Collective."""
        self.look()
        # Before the model may change it.
        key = self._key_of(call, is_training=is_training, splits=splits)
        _check_places(self._prober)
        _check_can_be_probed(call)
        if len(self._findings) > self._most:  # on all ranks
            self._drop_unused()
        rows = self._control.exchange([float(splits)])
        findings = self._prober.find(
            call if call.num_samples else None,
            run_module,
            has_gradients=torch.is_grad_enabled(),
            splits=any(row[0] for row in rows),
        )
        self._writes.take()
        self._counted |= {".".join(filter(None, number)) for number in findings.counted}
        index, self._num_found = self._num_found, self._num_found + 1
        self._findings[index] = findings
        if call.num_samples and findings.is_certain:
            self._index_by_key[key] = index
        return index

    def _drop_unused(self) -> None:
        """Drop what no rank has a call for, but the newest, of the step in progress.
        Collective.
        """
        mine = {*self._index_by_key.values(), self._index}
        used = set[int]().union(*self._control.exchange_objects(mine))
        used.update(range(self._num_found - MOST_UNUSED // 2, self._num_found))
        self._findings = {i: each for i, each in self._findings.items() if i in used}
        self._most = len(self._findings) + MOST_UNUSED

    def knows(self, index: int) -> bool:
        """Whether findings are still there."""
        return index in self._findings

    def findings(self, index: int) -> Findings:
        """Those of a probe."""
        return self._findings[index]

    def begin(self, index: int, call: ModelCall) -> Findings:
        """Begin a forward with the findings at ``index``."""
        self.look()
        self._index = index
        if call.cut_from is not None:
            call.cut_from.check_cut(self.current.are_batched)
        self._call = call
        self._num_calls.clear()
        return self.current

    def end_forward(self, *, follows: bool, is_cut: bool) -> None:
        """End the forward, which may have changed modules, their hooks and attributes.

        ``follows``: others of its step; ``is_cut``: into several microbatches.
        """
        found = self._writes.take() - self.current.rewritten
        of_units = [each.fqn + "." for unit in self._prober.units for each in unit.modules]
        if found and torch.is_grad_enabled():
            inside = any(each.startswith(tuple(of_units)) for each in found)
            self._is_late |= follows or (is_cut and inside)
        self._by_forward |= found
        if self._edits.take():
            self._look_anew()
        self._call = None  # whose arguments may be large

    def look(self) -> None:
        """Note what the program has written between forwards."""
        self._by_program |= self._writes.take() - self._counted

    def _look_anew(self) -> None:
        self.look()
        self._writes = Writes(self._prober.module)

    @property
    def written(self) -> float:
        """A number for the values of what was written; 0 for nothing, -1 if too late."""
        if self._is_late:
            return -1.0
        return digest_of(self._prober.module, self._by_program | self._by_forward)

    def check_written(self, of_all: Sequence[float], have_samples: Sequence[bool]) -> None:
        """Raise ``ValueError`` if ``written`` differs because values do; begin anew.

        What a forward writes is of ranks with samples.  Collective.
        """
        mine = self._by_program, self._by_forward
        self._by_program = self._by_forward = frozenset()
        is_late, self._is_late = min(of_all) < 0, False
        if len(set(of_all)) == 1 and not is_late:
            return
        by_rank = self._control.exchange_objects(mine)
        names = [frozenset[str]().union(*each) for each in zip(*by_rank, strict=True)]
        found = self._control.exchange([digest_of(self._prober.module, each) for each in names])
        if len({of_program for of_program, _ in found}) > 1:
            raise ValueError(_UNLIKE.format(", ".join(sorted(names[0]))))
        of_forward = {row[1] for row, has in zip(found, have_samples, strict=True) if has}
        if is_late or len(of_forward) > 1:
            raise ValueError(_KEEPS.format(", ".join(sorted(names[1]))))

    def count(self, module: UnitModule) -> int:
        """The number of earlier calls of the module in this forward."""
        return self._num_calls[module.fqn]

    def pass_over(self, module: UnitModule) -> None:
        """Count a call that another rank computes."""
        self._num_calls[module.fqn] += 1

    def prepare(self, module: UnitModule, arguments: Any) -> tuple[list[Any], BatchingRules]:
        """The flattened arguments of the module's next call, and the rules of that call."""
        leaves, spec = flatten(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if any(each.is_nested for each in tensors):
            raise ValueError(
                f"unit {module.fqn!r} is passed a nested tensor, which cannot be cut into "
                "samples. nn.TransformerEncoder makes them in evaluation: pass it "
                "enable_nested_tensor=False."
            )
        key = CallKey(module.fqn, self._num_calls[module.fqn])
        self._num_calls[module.fqn] += 1
        rules = self._rules_for(module, key, leaves, Layout.of(leaves, spec))
        for tensor, rule in zip(tensors, rules.inputs, strict=True):
            check_fits(tensor, rule, self._call.num_samples, module.fqn, "an argument")
        return leaves, rules

    def _rules_for(
        self, module: UnitModule, key: CallKey, leaves: list[Any], arguments: Layout
    ) -> BatchingRules:
        call = self._call
        variants = self.current.rules.get(key)
        if not variants:
            what = f"model(...): {module.fqn!r} is called {key.call + 1} times"
            raise Law.ALIKE.error(what, RuntimeError)
        for rules in variants:
            if rules.arguments == arguments and (
                call.num_samples == 1 or not rules.is_for_one_sample
            ):
                return rules
        unseen = ProbedCall(module.fqn, module.forward, leaves, arguments)
        inferred = self._prober.infer(unseen, variants[0], of=call, splits=self.current.splits)
        variants.append(inferred)
        return inferred


def _check_places(prober: Prober) -> None:
    """Raise ``RuntimeError`` unless the modules of all units, and parameters, are those that
    there were.
    """
    module_by_fqn = dict(prober.module.named_modules(remove_duplicate=False))
    for each in (each for unit in prober.units for each in unit.modules):
        if module_by_fqn.get(each.fqn) is not each.module:
            raise RuntimeError(
                f"model(...): unit {each.fqn!r} was taken out of the model, or replaced, after "
                "HetFSDP was built. Change the model before wrapping it."
            )
    slots = [slot for unit in (*prober.units, prober.root) for slot in unit.slots]
    owned = {(id(module), name) for slot in slots for module, name in slot.owners}
    for fqn, module in prober.module.named_modules():
        for name, param in module._parameters.items():
            if param is not None and (id(module), name) not in owned:
                raise RuntimeError(
                    f"model(...): the parameter {name!r} of module {fqn!r} was added after "
                    "HetFSDP was built, so that nothing trains it. Add parameters, layers and "
                    "adapters (LoRA) before wrapping the model."
                )


def _check_can_be_probed(call: ModelCall) -> None:
    if call.objects:
        raise ValueError(
            f"model(...): {', '.join(call.objects)} may change during the call, which every "
            "microbatch and every recomputation would repeat. Leave it out (use_cache=False "
            "for a KV cache); to generate text use model.unit_by_unit()."
        )
