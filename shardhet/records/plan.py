"""Plans: what each device computes and stores.  Planning writes them, training reads them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from shardhet.records.by_hand import (
    check_lengths,
    check_rank,
    check_units,
    groups_by_hand,
    inputs_of_each,
    last_round_size,
    microbatches_of_each,
    names_in_full,
    of_each,
    parts_of_groups,
    patterns_of,
    records_of_each,
    samples_of,
    shares_of_each,
    truth,
    whole,
)
from shardhet.records.cluster import DeviceSpec
from shardhet.records.codec import OMITTABLE, Document, PositiveInt, first_places
from shardhet.records.layout import Owned
from shardhet.records.schedule import StepForm
from shardhet.records.shown import ShownPlan
from shardhet.records.stages import (
    Groups,
    PlanInGroups,
    Stage,
    check_groups,
    check_stages,
    group_with,
    positions_by_stage,
    stage_by_unit,
)

EVERY_UNIT = ("*",)
EVERY_BLOCK = ("*[0-9]*",)  # the units that are one of several: ``blocks.3``
TOKENS_PER_TILE = 2048  # enough for kernels of matrix products to run at full speed
SHARES_TOLERANCE = 1e-6  # hand-written thirds do not sum to exactly one


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What one device does in each round of a step, and what it keeps between steps."""

    device: DeviceSpec = DeviceSpec()
    microbatch_sizes: tuple[int, ...]  # samples in each microbatch; empty if it only stores
    state_share: float  # of all parameters, gradients and optimizer state
    recomputed_units: tuple[str, ...] = ()  # fnmatch patterns; ("*",) is every unit
    # Patterns of recomputed units whose inputs are in the memory of the host from forward to
    # backward; ("*",) is every recomputed unit.
    inputs_on_host: Annotated[tuple[str, ...], OMITTABLE] = ()
    # Whether its rows of parameters and gradients, and the optimizer's state, are in the memory
    # of the host, where the optimizer steps.
    optimizer_on_host: Annotated[bool, OMITTABLE] = False
    owned: tuple[Owned, ...] | None = None  # of ``whole_matrices``; None: by its share
    token_share: float | None = None  # of its context group's samples; None: it is in none
    # Patterns of units, or of modules inside them, that are computed in tiles: so many tokens
    # of a sequence at a time, in forward and backward, where tokens do not meet.
    tiled_units: Annotated[tuple[str, ...], OMITTABLE] = ()
    tokens_per_tile: Annotated[PositiveInt, OMITTABLE] = TOKENS_PER_TILE

    @property
    def is_on_host(self) -> bool:
        """Whether it keeps anything in the memory of the host."""
        return bool(self.inputs_on_host) or self.optimizer_on_host

    @property
    def rank_batch_size(self) -> int:
        """The number of samples that this device computes in a round."""
        return sum(self.microbatch_sizes)

    @property
    def num_microbatches(self) -> int:
        """The number of forward (and backward) passes through each unit per round."""
        return len(self.microbatch_sizes)

    def recomputes(self, unit_fqn: str) -> bool:
        """Whether the unit's activations are recomputed in backward instead of kept."""
        return is_matched(unit_fqn, tuple(self.recomputed_units))

    def tiles(self, fqn: str) -> bool:
        """Whether a unit, or a module inside one, is computed in tiles."""
        return is_matched(fqn, tuple(self.tiled_units))

    def keeps_input_on_host(self, unit_fqn: str) -> bool:
        """Whether the unit's inputs are in the memory of the host from forward to backward."""
        is_named = is_matched(unit_fqn, tuple(self.inputs_on_host))
        return is_named and self.recomputes(unit_fqn)

    def check_inputs_on_host(self, position: int, unit_fqns: Sequence[str]) -> None:
        """Raise ``ValueError`` if units of ``inputs_on_host`` are not recomputed."""
        if not self.inputs_on_host:
            return
        patterns = tuple(each for each in self.inputs_on_host if each not in EVERY_UNIT)
        kept = [f for f in unit_fqns if is_matched(f, patterns) and not self.recomputes(f)]
        if kept or not self.recomputed_units:
            units = ", ".join(kept[:3]) or "any unit"
            raise ValueError(
                f"plan: ranks[{position}] has inputs_on_host {list(self.inputs_on_host)} but "
                f"does not recompute {units}. Recompute them too, or leave them out."
            )

    def split(self, num_samples: int) -> tuple[int, ...]:
        """Microbatch sizes for a batch of ``num_samples``, whatever the plan's own batch is."""
        if num_samples == self.rank_batch_size:
            return self.microbatch_sizes
        size = max(self.microbatch_sizes, default=num_samples)
        whole, rest = divmod(num_samples, size)
        return (size,) * whole + ((rest,) if rest else ())


@lru_cache(maxsize=2**14)
def is_matched(unit_fqn: str, patterns: tuple[str, ...]) -> bool:
    """Whether one of the patterns is that of the unit; asked of every rank and unit."""
    return any(fnmatchcase(unit_fqn, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedUnit:
    """One FSDP unit of the model that a plan was made for."""

    fqn: str
    numel: int  # elements of all its parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldsFor:
    """What the memory and times of a plan were counted for."""

    param_dtype: str  # of parameters in flight and of compute
    tokens_per_sample: int
    num_moments: int  # that the optimizer keeps per parameter

    def mismatch(self, **found: str | int) -> str | None:
        """What of a run, by field, is another or more than the plan was made for; or None."""
        for name, here in found.items():
            there = getattr(self, name)
            if here > there if isinstance(here, int) else here != there:
                return f"{name} is {here} but the plan was made for {there}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(ShownPlan, PlanInGroups, Document):
    """One entry per device, in an order that the plan itself defines.

    The samples of a round and every flat tensor are dealt in this order.  A step takes the
    microbatches of all devices ``num_rounds`` times and adds up the gradients (``StepForm``).
    A plan without ``units`` fits any model.  Rows and gradients of ``two_level_units``, which
    are patterns, cross between nodes once per node.
    """

    document_name: ClassVar[str] = "plan"
    document_version: ClassVar[int] = 2
    oldest_version: ClassVar[int] = 1  # of a step of one round
    reshard_after_forward: bool = True  # False keeps every unit unsharded until its backward
    num_rounds: Annotated[int, OMITTABLE] = 1
    reshard_after_backward: Annotated[bool, OMITTABLE] = True  # False: until the step ends
    reduce_each_round: Annotated[bool, OMITTABLE] = True  # False: gradients are reduced last
    last_round_size: int | None = None  # samples of the last round; None: as many as of any
    stages: tuple[Stage, ...] | None = None  # of a pipeline; None: all devices have all units
    context_groups: Groups | None = None  # positions with the same samples, each its tokens
    two_level_units: Annotated[tuple[str, ...], OMITTABLE] = ()  # cross once per node
    resident_units: Annotated[tuple[str, ...], OMITTABLE] = ()  # frozen parts stay whole
    # Patterns of units of which each parameter is stored whole, by one device.
    whole_matrices: tuple[str, ...] | None = None
    holds_for: HoldsFor | None = None  # None: it was not said
    ranks: tuple[RankPlan, ...]
    units: tuple[PlannedUnit, ...] = ()

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ValueError("plan: it has no devices. Give one entry per device.")
        distinct = [(i, self.ranks[i]) for i in first_places([*map(id, self.ranks)]).values()]
        for i, rank in distinct:
            check_rank(i, rank, SHARES_TOLERANCE)
        check_units(self.units)
        for i, rank in distinct:
            # Without the model's units, those that are named in full are known.
            fqns = [unit.fqn for unit in self.units] or names_in_full(rank.inputs_on_host)
            rank.check_inputs_on_host(i, fqns)
        if self.stages is not None:
            _check_stages(self, self.stages)
        check_groups(self, SHARES_TOLERANCE)
        _check_shares(self)
        if not any(rank.microbatch_sizes for rank in self.ranks):
            raise ValueError(
                "plan: no device computes anything. Give at least one device a microbatch."
            )
        StepForm.of(self)  # raises if there is no such form
        last = self.last_round_size
        if last is not None and not 0 < last <= self.round_size:
            raise ValueError(
                f"plan: last_round_size is {last} but must be from 1 to {self.round_size}, the "
                "samples of a round. Leave it out if all rounds are full."
            )

    @property
    def world_size(self) -> int:
        """The number of devices, and so of ranks, that the plan is for."""
        return len(self.ranks)

    @property
    def global_batch_size(self) -> int:
        """The number of samples in one optimizer step: of a group's devices in all rounds."""
        last = self.round_size if self.last_round_size is None else self.last_round_size
        return (self.num_rounds - 1) * self.round_size + last

    @property
    def round_size(self) -> int:
        """The number of samples in one round, over all devices of a group."""
        group, others = self.groups[0], (each[1:] for each in self.context_groups or ())
        leading = sorted({*group}.difference(chain(*others)))
        return sum(self.ranks[i].rank_batch_size for i in leading)

    @property
    def groups(self) -> tuple[range, ...]:
        """The positions of each stage, or of the one group that has all units."""
        return positions_by_stage(self.stages) if self.stages else (range(self.world_size),)

    def group_of(self, position: int) -> range:
        """The positions that compute the same units as ``position``."""
        return group_with(position, self.groups)

    @property
    def state_shares(self) -> tuple[float, ...]:
        """Each device's share of the state of its units; those of a group sum to one."""
        stored = [rank.state_share for rank in self.ranks]
        return tuple(parts_of_groups(stored, self.groups))

    def first_sample(self, position: int) -> int:
        """Index in a round of the first sample dealt to the device at ``position``."""
        before = range(self.group_of(position).start, self.context_group(position)[0])
        return sum(self.ranks[i].rank_batch_size for i in before if self.leads(i))

    def round_samples(
        self, position: int, round_index: int, num_samples: int | None = None
    ) -> range:
        """Indices in the global batch of what the device at ``position`` computes in a round.

        If the step has only ``num_samples``, its last rounds, and in a round the last
        positions, get fewer samples or none.
        """
        end = self.global_batch_size if num_samples is None else num_samples
        if not 0 <= end <= self.global_batch_size:
            raise ValueError(
                f"plan: {end} samples but a step has from 0 to {self.global_batch_size}. Draw "
                "batches of plan.global_batch_size."
            )
        start = round_index * self.round_size + self.first_sample(position)
        stop = start + self.ranks[position].rank_batch_size
        return range(min(start, end), min(stop, end))

    def last_microbatch_sizes(self, position: int) -> tuple[int, ...]:
        """The microbatches that the device at ``position`` computes in the last round."""
        if self.last_round_size is None:
            return self.ranks[position].microbatch_sizes
        num_samples = len(self.round_samples(position, self.num_rounds - 1))
        return self.ranks[position].split(num_samples)

    def sample_indices(self, position: int, num_samples: int | None = None) -> list[int]:
        """``round_samples`` of all rounds, one round after the other."""
        rounds = range(self.num_rounds)
        return [i for r in rounds for i in self.round_samples(position, r, num_samples)]

    @property
    def digest(self) -> str:
        """A hash of the plan; equal plans have equal digests."""
        return sha256(self.to_json().encode()).hexdigest()[:16]

    @classmethod
    def by_hand(
        cls,
        *,
        microbatch_sizes: Sequence[int],
        state_shares: Sequence[float] | None = None,
        num_microbatches: Sequence[int] | None = None,
        rank_batch_sizes: Sequence[int] | None = None,
        recompute: bool | Sequence[bool | Sequence[str]] = False,
        inputs_on_host: bool | Sequence[bool | Sequence[str]] = False,
        optimizer_on_host: bool | Sequence[bool] = False,
        tiles: bool | Sequence[bool | Sequence[str]] = False,
        tokens_per_tile: int = TOKENS_PER_TILE,
        devices: Sequence[DeviceSpec] | None = None,
        reshard_after_forward: bool = True,
        num_rounds: int = 1,
        reshard_after_backward: bool = True,
        reduce_each_round: bool = True,
        two_level_units: bool | Sequence[str] = False,
        resident_units: bool | Sequence[str] = False,
        whole_matrices: bool | Sequence[str] = False,
        global_batch_size: int | None = None,
        stages: Sequence[Stage] | None = None,
        context_groups: Sequence[Sequence[int]] | None = None,
        token_shares: Sequence[float] | None = None,
    ) -> Self:
        """A plan from one entry per device, for each round.

        Give either ``num_microbatches``, which are full, or ``rank_batch_sizes``, whose last
        microbatch may be smaller; with neither, each device runs one microbatch.  Without
        ``state_shares`` each device stores by its memory if all state theirs, else evenly.
        ``recompute`` is one bool, or one bool or list of unit patterns per device.  So is
        ``inputs_on_host``: the inputs of these recomputed units (True: of all of them) wait
        for backward on the host.  ``optimizer_on_host`` is one bool, or one per device.  So
        is ``tiles``: what units, or modules ("*.mlp"), compute token by token is computed
        ``tokens_per_tile`` at a time.  ``two_level_units`` and ``resident_units`` are one
        bool or a list of patterns.  So is ``whole_matrices`` (True: units with a number in
        their name): each of their parameters is stored by one device.  With a
        ``global_batch_size`` the last round has what is left of it.  ``stages`` take the
        devices in this order; those of a list in ``context_groups`` share samples by tokens,
        in proportion to ``token_shares``, one per device (None: even).
        """
        sizes = microbatches_of_each(microbatch_sizes, num_microbatches, rank_batch_sizes)
        world_size = len(sizes)
        claims = of_each("recompute", recompute, world_size)
        with_inputs = inputs_of_each(inputs_on_host, claims)
        with_tiles = of_each("tiles", tiles, world_size)
        on_host = of_each("optimizer_on_host", optimizer_on_host, world_size)
        specs = records_of_each("devices", DeviceSpec, devices or [DeviceSpec()] * world_size)
        in_stages = None if stages is None else records_of_each("stages", Stage, stages)
        groups = positions_by_stage(in_stages) if in_stages else (range(world_size),)
        shares = shares_of_each(state_shares, specs, groups)
        shared, tokens = groups_by_hand(context_groups, token_shares, world_size)
        check_lengths(world_size, state_shares=shares, devices=specs)
        round_size = samples_of(sizes[: groups[0].stop], shared)
        return cls(
            ranks=tuple(
                RankPlan(
                    microbatch_sizes=sizes[i],
                    state_share=shares[i],
                    recomputed_units=patterns_of(claims[i], "recompute", EVERY_UNIT),
                    inputs_on_host=patterns_of(with_inputs[i], "inputs_on_host", EVERY_UNIT),
                    optimizer_on_host=truth(f"optimizer_on_host[{i}]", on_host[i]),
                    tiled_units=patterns_of(with_tiles[i], "tiles", EVERY_UNIT),
                    tokens_per_tile=whole("tokens_per_tile", tokens_per_tile),
                    device=specs[i],
                    token_share=tokens[i],
                )
                for i in range(world_size)
            ),
            reshard_after_forward=truth("reshard_after_forward", reshard_after_forward),
            num_rounds=whole("num_rounds", num_rounds),
            reshard_after_backward=truth("reshard_after_backward", reshard_after_backward),
            reduce_each_round=truth("reduce_each_round", reduce_each_round),
            two_level_units=patterns_of(two_level_units, "two_level_units", EVERY_UNIT),
            resident_units=patterns_of(resident_units, "resident_units", EVERY_UNIT),
            whole_matrices=patterns_of(whole_matrices, "whole_matrices", EVERY_BLOCK) or None,
            last_round_size=last_round_size(global_batch_size, num_rounds, round_size),
            stages=None if in_stages is None else tuple(in_stages),
            context_groups=shared or None,
        )

    @classmethod
    def even(
        cls,
        world_size: int,
        *,
        microbatch_size: int,
        num_microbatches: int = 1,
        recompute: bool = False,
    ) -> Self:
        """The plan of stock FSDP: every device computes and stores the same."""
        return cls.by_hand(
            microbatch_sizes=[microbatch_size] * whole("world_size", world_size),
            num_microbatches=[num_microbatches] * world_size,
            recompute=recompute,
        )


def plan_of(given: Any) -> Plan:
    """A plan as it is, or from the path of its file, or from one batch size per device."""
    if isinstance(given, Plan):
        return given
    if isinstance(given, str | Path):
        return Plan.load(given)
    if isinstance(given, Iterable):
        return Plan.by_hand(microbatch_sizes=list(given))
    raise TypeError(
        f"plan is {given!r} but must be a Plan (Plan.load(path), Plan.by_hand(...), "
        "plan_for(...)), the path of its file, or a list of batch sizes."
    )


def pipeline_of(plan: Plan) -> tuple[Stage, ...]:
    """The stages, or the one that has all units."""
    return plan.stages or (Stage(units=("*",), num_ranks=plan.world_size),)


def _check_shares(plan: "Plan") -> None:
    for i, group in enumerate(plan.groups):
        shares = [plan.ranks[k].state_share for k in group]
        if abs((total := sum(shares)) - 1) > SHARES_TOLERANCE:
            of_stage = f" of stages[{i}]" * (plan.stages is not None)
            raise ValueError(
                f"plan: state shares {shares}{of_stage} sum to {total} but must sum to 1. "
                f"Divide each by {total}."
            )


def _check_stages(plan: "Plan", stages: tuple[Stage, ...]) -> None:
    check_stages(
        stages,
        batch_sizes=[rank.rank_batch_size for rank in plan.ranks],
        num_rounds=plan.num_rounds,
    )
    if plan.two_level_units:
        raise ValueError(
            "plan: two_level_units with stages, whose devices gather among themselves. Leave "
            "one of them out."
        )
    stage_by_unit(stages, [unit.fqn for unit in plan.units if unit.fqn])
