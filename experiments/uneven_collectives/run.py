"""How fast are uneven all-gather and reduce-scatter, against gloo's own even ones?

python -m experiments.uneven_collectives.run            two to four minutes
python -m experiments.uneven_collectives.run --quick    under a minute
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.common.launch import run_ranks
from experiments.common.results import Bar, Page, Spread, parser_of
from experiments.common.systems import slowest_rank_seconds
from experiments.uneven_collectives import candidates
from experiments.uneven_collectives.candidates import Run
from shardhet.comm.calls import Transport
from shardhet.comm.transport import meet

HERE = Path(__file__).parent
UNEVEN_SHARES = (0.5, 0.25, 0.15, 0.1)
EVEN_SHARES = (0.25, 0.25, 0.25, 0.25)
WORLD_SIZE = len(UNEVEN_SHARES)
SIZES_MIB = (1, 16, 128)
NUM_REPEATS = 30
NUM_REPEATS_QUICK = 6
BYTES_PER_ELEMENT = 4  # float32
OURS_UNEVEN, OURS_EVEN, GLOO = "shardhet, uneven", "shardhet, even", "gloo's own, even"
MESSAGES = "shardhet between hosts, uneven"  # what it does where memory cannot be read


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed call."""

    collective: str
    variant: str
    total_mib: int
    repeat: int
    slowest_rank_s: float


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to do one collective on one size, ready to be called."""

    collective: str
    name: str
    run: Run
    output: Tensor
    expected: Tensor

    def check(self) -> None:
        """Raise where the result is not the one all candidates must have."""
        self.output.fill_(-1)
        self.run()
        if not torch.equal(self.output, self.expected):
            raise RuntimeError(
                f"{self.collective}, {self.name}: wrong result. Mend it before timing it."
            )


def main() -> None:
    """Measure, print, and keep."""
    options = parser_of(__doc__).parse_args()
    page = Page(HERE, is_kept=not options.quick)
    num_repeats = NUM_REPEATS_QUICK if options.quick else NUM_REPEATS
    samples = run_ranks(measure, WORLD_SIZE, num_repeats)[0]
    header, rows = table(samples)
    page.table(f"Median ms of a call (p10-p90) over {num_repeats} repeats", header, rows)
    page.bars(bars(samples))
    page.keep({"results.csv": samples})


# What each rank does


def measure(rank: int, num_repeats: int) -> list[Sample]:
    """Time all variants, interleaved within each repeat; the same list on every rank."""
    samples = []
    for total_mib in SIZES_MIB:
        variants = list(make_variants(rank, total_mib * 2**20 // BYTES_PER_ELEMENT))
        for variant in variants:
            variant.check()  # connects and touches all buffers, too
        for repeat in range(-1, num_repeats):  # the first one warms up
            # Another order in each repeat, so that none profits from the one before it.
            start = repeat % len(variants)
            for variant in variants[start:] + variants[:start]:
                [slowest_rank_s] = slowest_rank_seconds(lambda _, run=variant.run: run(), 1)
                if repeat >= 0:
                    samples.append(
                        Sample(
                            variant.collective, variant.name, total_mib, repeat, slowest_rank_s
                        )
                    )
    return samples


def make_variants(rank: int, total_numel: int) -> Iterator[Variant]:
    """All candidates for one size, on tensors of whole numbers: sums are exact in any order."""
    even, uneven = (split_by(shares, total_numel) for shares in (EVEN_SHARES, UNEVEN_SHARES))
    gather_in_memory, reduce_in_memory = (
        partial(call, transport=shared_host())
        for call in (candidates.our_gather, candidates.our_reduce)
    )
    whole = (torch.arange(total_numel) % 8191).float()
    gathered = torch.empty_like(whole)
    gathers: list[tuple[str, candidates.GatherCandidate, list[int]]] = [
        (OURS_UNEVEN, gather_in_memory, uneven),
        (OURS_EVEN, gather_in_memory, even),
        (MESSAGES, candidates.our_gather, uneven),
        (GLOO, candidates.gloo_all_gather, even),
        ("broadcasts, uneven", candidates.broadcasts, uneven),
        ("all_to_all, uneven", candidates.all_to_all_gather, uneven),
        ("gloo's own, padded", candidates.padded_all_gather, uneven),
    ]
    for name, gather, split_numels in gathers:
        shard = own_part(whole, split_numels, rank).clone()
        run = gather(gathered, shard, split_numels)
        yield Variant("all-gather", name, run, gathered, whole)
    full = whole * (rank + 1)
    total = whole * (WORLD_SIZE * (WORLD_SIZE + 1) // 2)
    reductions: list[tuple[str, candidates.ReduceCandidate, list[int]]] = [
        (OURS_UNEVEN, reduce_in_memory, uneven),
        (OURS_EVEN, reduce_in_memory, even),
        (MESSAGES, candidates.our_reduce, uneven),
        (GLOO, candidates.gloo_reduce_scatter, even),
        ("all_to_all + sum, uneven", candidates.all_to_all_reduce, uneven),
        ("list form, uneven", candidates.list_reduce_scatter, uneven),
        ("reduces, uneven", candidates.reduces, uneven),
        ("gloo's own, padded", candidates.padded_reduce_scatter, uneven),
    ]
    for name, reduce, split_numels in reductions:
        expected = own_part(total, split_numels, rank)
        output = torch.empty_like(expected)
        run = reduce(output, full, split_numels)
        yield Variant("reduce-scatter", name, run, output, expected)


@cache
def shared_host() -> Transport | None:
    """For ranks that read each other's memory."""
    assert dist.group.WORLD is not None
    met = meet(dist.group.WORLD, 1)
    return None if met is None else met[0]


def split_by(shares: Sequence[float], total_numel: int) -> list[int]:
    """Whole numbers in proportion to ``shares`` that add up to ``total_numel``."""
    stops = [round(stop * total_numel) for stop in accumulate(shares)]
    return [stop - start for start, stop in zip([0, *stops], stops, strict=False)]


def own_part(whole: Tensor, split_numels: Sequence[int], rank: int) -> Tensor:
    """The part of ``whole`` that ``rank`` stores."""
    return whole.split(list(split_numels))[rank]


# What is shown


def table(samples: Sequence[Sample]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: one row per variant, two columns per size."""
    header = ["collective", "variant"]
    for mib in SIZES_MIB:
        header += [f"{mib} MiB", "x gloo"]
    rows = []
    for collective, name in dict.fromkeys((s.collective, s.variant) for s in samples):
        row = [collective, name]
        for mib in SIZES_MIB:
            spread = spread_of(samples, collective, name, mib)
            ratio = spread.median / spread_of(samples, collective, GLOO, mib).median
            row += [spread.cell(1, scale=1000), f"{ratio:.2f}"]
        rows.append(row)
    return header, rows


def bars(samples: Sequence[Sample]) -> list[Bar]:
    """What was promised before the measurement."""

    def ratio(collective: str, to: str, mib: int) -> float:
        ours = spread_of(samples, collective, OURS_UNEVEN, mib).median
        return ours / spread_of(samples, collective, to, mib).median

    against_gloo = [
        ("all-gather", 16, 0.85),
        ("all-gather", 128, 0.5),
        ("reduce-scatter", 16, 0.6),
        ("reduce-scatter", 128, 0.4),
    ]
    result = [
        Bar(
            claim=f"{collective}, {mib} MiB: uneven / gloo's own even",
            measured=ratio(collective, GLOO, mib),
            at_most=bound,
        )
        for collective, mib, bound in against_gloo
    ]
    for collective in ("all-gather", "reduce-scatter"):
        claim = f"{collective}, 128 MiB: uneven / our own even"
        result.append(
            Bar(claim=claim, measured=ratio(collective, OURS_EVEN, 128), at_most=1.15)
        )
    return result


def spread_of(samples: Sequence[Sample], collective: str, variant: str, mib: int) -> Spread:
    """Of one cell of the table."""
    key = (collective, variant, mib)
    return Spread.of(
        [s.slowest_rank_s for s in samples if (s.collective, s.variant, s.total_mib) == key]
    )


if __name__ == "__main__":
    main()
