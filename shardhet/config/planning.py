"""Schemas of ``shardhet plan`` and ``shardhet simulate``, and the records made from them.

Both take hardware and model in the same way: either described, with a profile derived from
specifications, or measured, as three files in one folder.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from shardhet.config.checks import (
    Checked,
    ConfigError,
    above,
    at_least,
    check_fields,
    check_fp16_accumulation,
    check_measured,
    checked,
    config_errors,
    is_fraction,
    number_of,
    one_of,
)
from shardhet.config.compose import register_schemas
from shardhet.config.models import ModelConf
from shardhet.planner.problem.constraints import TOLERANCE, Constraints, DeviceLimits
from shardhet.planner.stages.groups import MAX_STAGES
from shardhet.pricing import derive
from shardhet.pricing.part import part_of
from shardhet.pricing.scenario import Scenario
from shardhet.records.cluster import USABLE_MEMORY_FRACTION, Cluster, DeviceSpec
from shardhet.records.margin import with_fraction, with_libraries
from shardhet.records.plan import EVERY_BLOCK

LEAVE_OUT = ("ask", "auto", "never")
GIB = 2**30


class PlannedPrecision(Enum):
    """Number formats of gathered parameters and of compute; state is float32."""

    AUTO = ""  # BF16 if every kind of device has it, else FP32
    FP32 = "float32"
    BF16 = "bfloat16"
    FP16 = "float16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The scenario to plan for, and its name."""

    scenario: Scenario
    name: str  # of the model, for titles


@dataclass(kw_only=True)
class InputsConf(Checked):
    """Hardware and model, described or measured."""

    # A description; its files are in cluster/described.  null: the cards that are here.
    cluster: dict[str, Any] | None = None
    cluster_file: str | None = None  # your own description instead
    cards: str | None = None  # or these cards: 4090+A6000 | 3090x2
    network: str | None = None  # between their hosts: 10 GbE; null: 1 GbE
    hosts: list[str] = field(default_factory=list)  # host patterns; empty: all hosts
    measured: str | None = None  # a folder with cluster.json, workload.json and profile.json
    model: ModelConf = MISSING
    vocab_size: int | None = checked(None, at_least(1))  # null: the model's usual one
    # Tokens of a sample; null: the model's usual ones.
    seq_len: int | None = checked(None, at_least(1))
    precision: PlannedPrecision = PlannedPrecision.AUTO
    # Tensors that the optimizer keeps for each parameter; null: 2, as Adam, or as measured.
    num_moments: int | None = checked(None, at_least(0))
    fp16_accumulation: bool = False  # with FP16: derived times are of sums in float16, too
    # Of peak FLOP/s, in derived profiles; null: by kind, precision and shape.
    compute_fraction: float | None = checked(None, above(0), is_fraction)
    # Of links' bandwidth, likewise; null: by crowding, and a cable's speed.
    link_fraction: float | None = checked(None, above(0), is_fraction)
    # Of each device; null: shardhet.records.margin.
    usable_memory_fraction: float | None = checked(None, above(0), is_fraction)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fp16_accumulation(self.fp16_accumulation, self.precision)

    def load(self, described: Callable[[], Cluster], model_name: str) -> Inputs:
        """Read or derive everything; a ConfigError names file, field and remedy.

        ``described`` creates the cluster of the group ``cluster``.
        """
        if self.measured is not None:
            return self._load_measured(Path(self.measured))
        path = None if self.cluster_file is None else Path(self.cluster_file)
        if path is not None and not path.is_file():
            raise ConfigError(
                f"cluster_file: {self.cluster_file!r} does not exist. Pass the path of a file."
            )
        if self.network is not None and self.cards is None:
            raise ConfigError(
                "network: it has no effect without cards. Drop it, or give cards."
            )
        with config_errors():
            if self.cards is not None:
                cluster = Cluster.of_cards(self.cards, network=self.network)
            else:
                cluster = described() if path is None else Cluster.load(path)
        cluster = _only(self.hosts, self._with_margin(cluster))
        self._check_meets(cluster)
        return self.derived(cluster, model_name)

    def _check_meets(self, cluster: Cluster) -> None:
        if self.has_stages and derive.meets_over_gloo(cluster):
            raise ConfigError(
                "max_stages: GPUs of AMD and of NVIDIA meet over gloo alone, with which no "
                "stages are trained. Drop max_stages, or leave out the GPUs of one maker."
            )

    def derived(
        self, cluster: Cluster, model_name: str, *, has_stages: bool | None = None
    ) -> Inputs:
        """Workload and profile for this cluster, from specifications.

        If the number format is AUTO, it depends on the devices.  ``has_stages`` None: as asked.
        """
        staged = self.has_stages if has_stages is None else has_stages
        with config_errors():
            cluster.check_described()  # the model may take long to read
        workload = self.model.described(
            param_dtype=self._dtype(cluster), vocab_size=self.vocab_size, seq_len=self.seq_len
        )
        if self.num_moments is not None:
            workload = workload.with_moments(self.num_moments)
        with config_errors():
            if self._has_default_margin(cluster):
                cluster = with_libraries(cluster, has_stages=staged)
            profile = derive.derive_profile(
                cluster,
                workload,
                compute_fraction=self.compute_fraction,
                link_fraction=self.link_fraction,
                fp16_accumulation=self.fp16_accumulation,
            )
        name = self.model.title(model_name)
        return Inputs(scenario=Scenario(cluster, workload, profile), name=name)

    def part_of(
        self, inputs: Inputs, *, keeps_precision: bool = True, has_stages: bool | None = None
    ) -> Callable[[tuple[int, ...]], Scenario]:
        """The scenario of some of the devices of ``inputs``, as ``derived``."""
        scenario, conf = inputs.scenario, self
        if self.measured is not None:
            return partial(part_of, scenario)
        if keeps_precision:  # else that of these devices alone
            conf = replace(self, precision=PlannedPrecision(scenario.workload.param_dtype))
        return lambda positions: (
            conf.derived(
                scenario.cluster.only(positions), inputs.name, has_stages=has_stages
            ).scenario
        )

    def in_bfloat16(self, inputs: Inputs) -> tuple[tuple[int, ...], Callable[..., Scenario]]:
        """The devices with bfloat16, where others have all compute in float32, and the scenario
        of some of them; none if nothing is derived, or all compute in one format.
        """
        cluster = inputs.scenario.cluster
        lacking = self._lacking(cluster, PlannedPrecision.BF16)
        kept = [i for i, device in enumerate(cluster.devices) if device.kind not in lacking]
        is_asked = self.measured is None and self.precision is PlannedPrecision.AUTO
        part = self.part_of(inputs, keeps_precision=False)
        return tuple(kept) if lacking and is_asked else (), part

    def _load_measured(self, folder: Path) -> Inputs:
        check_measured("measured", folder)
        with config_errors():
            scenario = Scenario.load(folder)
        self._check_meets(scenario.cluster)
        scenario = replace(scenario, cluster=self._with_margin(scenario.cluster))
        return Inputs(scenario=scenario, name=folder.resolve().name)

    @property
    def has_stages(self) -> bool:
        """Whether pipelines are looked for, whose stages have communicators of their own."""
        return False

    def _has_default_margin(self, cluster: Cluster) -> bool:
        """Whether neither the configuration nor the cluster's file states another one."""
        usual = cluster.usable_memory_fraction == USABLE_MEMORY_FRACTION
        return self.usable_memory_fraction is None and usual

    def _with_margin(self, cluster: Cluster) -> Cluster:
        fraction = self.usable_memory_fraction
        return cluster if fraction is None else with_fraction(cluster, fraction)

    def _dtype(self, cluster: Cluster) -> str:
        auto, fp32, bf16, fp16 = PlannedPrecision
        if self.precision in (auto, fp32):
            is_bf16 = self.precision is auto and not self._lacking(cluster, bf16)
            return (bf16 if is_bf16 else fp32).value
        if names := self._lacking(cluster, self.precision):
            others = ["FP32"]
            if not self._lacking(cluster, fp16):
                others.insert(0, "FP16")
            raise ConfigError(
                f"precision: {self.precision.name} but it is not described of "
                f"{', '.join(names)}. Set precision={' or '.join(others)}, or leave these "
                "devices out."
            )
        return self.precision.value

    def _lacking(self, cluster: Cluster, precision: PlannedPrecision) -> list[str]:
        """The kinds of devices of which this number format is not described."""
        described = {kind.kind: dict(kind.peak_flops_per_s) for kind in cluster.kinds}
        kinds = dict.fromkeys(str(device.kind) for device in cluster.devices)
        return [kind for kind in kinds if not described.get(kind, {}).get(precision.value)]


def _only(patterns: Sequence[str], cluster: Cluster) -> Cluster:
    """The nodes whose hosts match one of the patterns; all nodes if there are no patterns."""
    if not patterns:
        return cluster
    hosts = [node.host for node in cluster.nodes]
    for pattern in patterns:
        if not any(fnmatchcase(host, pattern) for host in hosts):
            raise ConfigError(
                f"hosts: {pattern!r} fits none of {', '.join(hosts)}. Write patterns such as "
                f"{hosts[0]}, or drop the key."
            )
    kept = [n for n in cluster.nodes if any(fnmatchcase(n.host, each) for each in patterns)]
    return replace(cluster, nodes=tuple(kept))


@dataclass(kw_only=True)
class LimitConf:
    """Demands on one device, or on all devices of a kind."""

    memory_gib: float | None = checked(None, above(0))  # the most memory to use
    batch: int | None = checked(None, at_least(0))  # exactly this many samples
    microbatch: int | None = checked(None, at_least(1))  # at most this many samples
    share: float | None = checked(None, is_fraction)  # at most this share of the state
    exact_share: float | None = checked(None, is_fraction)  # exactly this share of the state
    recompute: bool | None = None  # everything or nothing

    def to_record(self, key: str) -> DeviceLimits:
        """The limits as a record; ``key`` is their key in the configuration."""
        check_fields(self, f"{key}.")
        if self.share is not None and self.exact_share is not None:
            raise ConfigError(
                f"{key}: share is the most that it stores, exact_share what it stores. Drop "
                "one of them."
            )
        return DeviceLimits(
            memory_budget_bytes=None if self.memory_gib is None else int(self.memory_gib * GIB),
            rank_batch_size=self.batch,
            max_microbatch_size=self.microbatch,
            max_state_share=self.share,
            state_share=self.exact_share,
            recomputes=self.recompute,
        )


@dataclass(kw_only=True)
class PlannerConf(InputsConf):
    """The configuration of ``shardhet plan``."""

    global_batch_size: int = checked(64, at_least(1))
    for_tokens: str | None = None  # "10M": how long so many tokens take is said
    limits: dict[str, LimitConf] = field(default_factory=dict)  # by position or kind
    equal: list[list[int]] = field(default_factory=list)  # positions that do the same
    max_microbatch_size: int | None = checked(None, at_least(1))
    # Of accumulation in a step; null leaves it open.
    max_rounds: int | None = checked(None, at_least(1))
    max_stages: int = checked(1, at_least(1))  # of a pipeline, of groups of devices; 1: none
    inputs_on_host: bool = False  # inputs of recomputed units may wait in the hosts' memory
    optimizer_on_host: bool = False  # optimizers may step in the hosts' memory
    context_groups: bool = False  # devices may compute a sample together, by tokens
    resident_units: bool = True  # frozen weights may stay unsharded over steps
    whole_matrices: bool = False  # of blocks, each on one device, as Muon needs them
    # Say which devices are better left out; auto: plan without.
    leave_out: str = checked(LEAVE_OUT[0], one_of(LEAVE_OUT))
    # A plan may be this part slower than the fastest if it is simpler and fills memory less.
    tolerance: float = checked(TOLERANCE, at_least(0), is_fraction)
    what_if_s: float = checked(30.0, at_least(0))  # for trying what would help; 0: nothing
    explain: bool = False  # what was proven, what all changes that were tried give
    baselines: bool = False
    out: str | None = None  # the plan, as JSON
    scenario_out: str | None = None  # a folder: cluster, workload and profile of the plan
    picture: str | None = None  # needs matplotlib

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.for_tokens is not None:
            number_of("for_tokens", self.for_tokens)
        if self.max_stages > MAX_STAGES:
            raise ConfigError(
                f"max_stages: {self.max_stages} but pipelines are planned with up to "
                f"{MAX_STAGES} stages."
            )
        if self.max_stages > 1:
            self._check_beside("max_stages", self.refused_beside_stages())
        if self.context_groups:
            refused = self.refused_beside_stages() + ["whole_matrices"] * self.whole_matrices
            self._check_beside("context_groups", refused)
        if self.whole_matrices:
            self._check_beside("whole_matrices", ["baselines"] * self.baselines)

    @property
    def has_stages(self) -> bool:
        """Whether pipelines are looked for, whose stages have communicators of their own."""
        return self.max_stages > 1

    def without_stages(self, inputs: Inputs) -> tuple["PlannerConf", Inputs]:
        """The same for plans without stages, beside which less memory is left free."""
        if self.max_stages == 1:
            return self, inputs
        conf = replace(self, max_stages=1)
        if conf.measured is not None:
            return conf, inputs
        return conf, conf.derived(inputs.scenario.cluster, inputs.name)

    def refused_beside_stages(self) -> list[str]:
        """What is set that is not planned for together with stages."""
        beside = {
            "context_groups": self.has_stages and self.context_groups,
            "leave_out=auto": self.leave_out == "auto",
            "limits": bool(self.limits),
            "equal": bool(self.equal),
            "picture": self.picture is not None,
            "scenario_out": self.scenario_out is not None,
        }
        return [key for key, is_set in beside.items() if is_set]

    def _check_beside(self, asked: str, beside: Sequence[str]) -> None:
        for key in beside:
            raise ConfigError(
                f"{asked}: {getattr(self, asked)} together with {key} is not planned for yet. "
                "Drop one of them."
            )

    def to_constraints(self, devices: Sequence[DeviceSpec]) -> Constraints:
        """The constraints on these devices; ConfigError if a limit matches none of them."""
        limits: dict[int, DeviceLimits] = {}
        for key, limit in self.limits.items():
            record = limit.to_record(f"limits.{key}")
            for position in _positions(f"limits.{key}", key, devices):
                if position in limits:
                    raise ConfigError(
                        f"limits.{key}: device {position} ({devices[position]}) is limited "
                        "by another key too. Put its limits under one key."
                    )
                limits[position] = record
        constraints = Constraints(
            limits=limits,
            equal=tuple(map(tuple, self.equal)),
            max_microbatch_size=self.max_microbatch_size,
            max_rounds=self.max_rounds,
            may_keep_inputs_on_host=self.inputs_on_host,
            may_keep_optimizer_on_host=self.optimizer_on_host,
            may_keep_frozen_weights=self.resident_units,
            may_share_samples=self.context_groups,
            whole_matrices=EVERY_BLOCK if self.whole_matrices else (),
        )
        with config_errors():
            constraints.check(len(devices))
        return constraints


@dataclass(kw_only=True)
class SimulateConf(InputsConf):
    """The configuration of ``shardhet simulate``, besides the plan."""

    trace: str | None = None  # for Perfetto
    picture: str | None = None  # needs matplotlib


def register_planning_schemas() -> None:
    """Register the schemas with Hydra."""
    register_schemas()
    store = ConfigStore.instance()
    store.store(group="schema", name="planner", node=PlannerConf)
    store.store(group="schema", name="simulate", node=SimulateConf)


def _positions(what: str, key: str, devices: Sequence[DeviceSpec]) -> list[int]:
    """Positions of the devices that a key names, by position or by a pattern of their kind."""
    if key.isdigit() and int(key) < len(devices):
        return [int(key)]
    named = [i for i, each in enumerate(devices) if fnmatchcase(each.kind or "", key)]
    if not named:
        kinds = ", ".join(dict.fromkeys(str(each.kind) for each in devices))
        raise ConfigError(
            f"{what}: no such device. Give a position from 0 to {len(devices) - 1}, or a "
            f"kind or pattern of it: {kinds}."
        )
    return named
