"""The clusters, the models and the plans whose steps are predicted and then taken."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from experiments.common.unlike import MixedCluster
from experiments.decoders import decoder_config
from shardhet import Plan
from shardhet.models.decoder import DecoderConfig
from shardhet.planner import Constraints, baselines, solve
from shardhet.pricing.scenario import Scenario

MAX_MICROBATCH_SIZE = 8
# A quarter of a core is given in turns of 4 ms, 16 ms apart (measured, a kernel of 250 ticks a
# second): steps have to be long beside that.
SAMPLES_PER_RANK = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cluster with one model."""

    cluster: MixedCluster
    config: DecoderConfig
    global_batch_size: int
    is_slowed_from_outside: bool  # by control groups; else emulated in the process

    @property
    def name(self) -> str:
        """For tables and the command line."""
        by = "quota" if self.is_slowed_from_outside else "emulated"
        speeds = " : ".join(f"{each:g}" for each in self.cluster.cores)
        return f"{by} {speeds}, {self.config.num_layers} x {self.config.width}"


NARROW = decoder_config(width=256, num_layers=6, seq_len=64)
# Four times the bytes for each token.
WIDE = decoder_config(width=512, num_layers=3, seq_len=32)


def _case(cores: tuple[float, ...], config: DecoderConfig, *, from_outside: bool) -> Case:
    return Case(
        cluster=MixedCluster(name="", cores=cores),
        config=config,
        global_batch_size=SAMPLES_PER_RANK * len(cores),
        is_slowed_from_outside=from_outside,
    )


# Speeds differ by up to 8; together they need less than two cores.
CASES = (
    _case((0.95, 0.475), NARROW, from_outside=True),
    _case((0.96, 0.12), NARROW, from_outside=True),
    _case((0.8, 0.4, 0.4), WIDE, from_outside=True),
    _case((0.6, 0.6, 0.3, 0.3), NARROW, from_outside=True),
    _case((0.9, 0.45, 0.225, 0.225), WIDE, from_outside=True),
    _case((1.0, 0.5), NARROW, from_outside=False),
    _case((0.8, 0.1), WIDE, from_outside=False),
    _case((0.7, 0.35, 0.35), NARROW, from_outside=False),
    _case((0.9, 0.45, 0.225, 0.225), NARROW, from_outside=False),
    _case((0.5, 0.5, 0.4, 0.2), WIDE, from_outside=False),
)


def plans_of(case: Case, scenario: Scenario) -> Mapping[str, Plan]:
    """Good and bad ones, by name."""
    batch = case.global_batch_size
    demands = Constraints(max_microbatch_size=MAX_MICROBATCH_SIZE)
    best = solve(scenario, global_batch_size=batch, constraints=demands).plan
    even = baselines.even(scenario, global_batch_size=batch, constraints=demands).plan
    return {"planned": best, "even": even, "upside down": _upside_down(best)}


def _upside_down(plan: Plan) -> Plan:
    """Every device does what another should: the first what is meant for the last."""
    turned = zip(plan.ranks, reversed(plan.ranks), strict=True)
    return replace(
        plan, ranks=tuple(replace(other, device=rank.device) for rank, other in turned)
    )
