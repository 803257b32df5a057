"""The clusters and the work of the comparison, as records."""

from dataclasses import dataclass

from experiments.common.unlike import MixedCluster
from experiments.decoders import decoder_config
from experiments.mixed_cluster.systems import Work

MILD = MixedCluster(name="mild", cores=(0.95, 0.76))
TWO_KINDS = MixedCluster(name="two kinds", cores=(0.6, 0.6, 0.3, 0.3))
STRONG = MixedCluster(name="strong", cores=(0.9, 0.45, 0.225, 0.225))
EXTREME = MixedCluster(name="extreme", cores=(1.0, 0.1))
CLUSTERS = (MILD, TWO_KINDS, STRONG, EXTREME)

COMPUTE_BOUND = Work(
    name="compute-bound",
    config=decoder_config(width=256, num_layers=6, seq_len=128),
    global_batch_size=64,
)
# The same bytes are gathered and reduced for a sixteenth of the compute per sample.
COMMUNICATION_BOUND = Work(
    name="communication-bound",
    config=decoder_config(width=512, num_layers=4, seq_len=16),
    global_batch_size=32,
)

MICROBATCH_SIZES = {COMPUTE_BOUND.name: 8, COMMUNICATION_BOUND.name: 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cluster with one thing to train."""

    cluster: MixedCluster
    work: Work
    max_microbatch_size: int  # in plans of HetFSDP
    microbatch_size: int  # of stock systems that accumulate, and of plain PyTorch

    @property
    def plain_batch_size(self) -> int:
        """Samples of a step of plain PyTorch: an even share of the global batch."""
        return self.work.global_batch_size // self.cluster.world_size

    @property
    def has_bars(self) -> bool:
        """Whether something was claimed of it before."""
        return self.cluster is STRONG and self.work is COMPUTE_BOUND

    @property
    def num_weighed(self) -> int:
        """Launches in which memory is read; there is a bar on it in one case only."""
        return 3 if self.has_bars else 1

    @property
    def name(self) -> str:
        """For files and the command line."""
        return f"{self.cluster.name}, {self.work.name}"


CASES = tuple(
    Case(
        cluster=cluster,
        work=work,
        max_microbatch_size=16 if work is COMMUNICATION_BOUND else 8,
        microbatch_size=MICROBATCH_SIZES[work.name],
    )
    for cluster in CLUSTERS
    for work in (COMPUTE_BOUND, COMMUNICATION_BOUND)
)
