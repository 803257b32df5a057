"""How fast are uneven all-gather and reduce-scatter, against gloo's own even ones?

python -m experiments.uneven_collectives.run            two to four minutes
python -m experiments.uneven_collectives.run --quick    under a minute
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.common.launch import run_ranks
from experiments.common.results import Bar, Page, Spread, parser_of
from experiments.common.systems import slowest_rank_seconds
from shardhet.comm.calls import Transport, meet
from shardhet.comm.channel import Channel
from shardhet.comm.collectives import all_gather_uneven, reduce_scatter_uneven
from shardhet.comm.devices import BufferPool

HERE = Path(__file__).parent
UNEVEN_SHARES = (0.5, 0.25, 0.15, 0.1)
EVEN_SHARES = (0.25, 0.25, 0.25, 0.25)
WORLD_SIZE = len(UNEVEN_SHARES)
Run = Callable[[], Any]
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


class Variant(NamedTuple):
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
    # By messages where there is no transport, as between hosts.
    ways = ((OURS_UNEVEN, uneven, shared_host()), (OURS_EVEN, even, shared_host()))
    ways += ((MESSAGES, uneven, None),)
    whole = (torch.arange(total_numel) % 8191).float()
    full, total = whole * (rank + 1), whole * (WORLD_SIZE * (WORLD_SIZE + 1) // 2)
    gathered = torch.empty_like(whole)
    for name, numels, transport in (*ways, (GLOO, even, None)):
        shard = own_part(whole, numels, rank).clone()
        run = our_gather(gathered, shard, numels, transport=transport)
        if name == GLOO:
            run = partial(dist.all_gather_single, gathered, shard)
        yield Variant("all-gather", name, run, gathered, whole)
    for name, numels, transport in (*ways, (GLOO, even, None)):
        expected = own_part(total, numels, rank)
        output = torch.empty_like(expected)
        run = our_reduce(output, full, numels, transport=transport)
        if name == GLOO:
            run = partial(dist.reduce_scatter_single, output, full)
        yield Variant("reduce-scatter", name, run, output, expected)


def our_gather(
    output: Tensor,  # [sum(split_numels)]
    shard: Tensor,  # [split_numels[rank]]
    split_numels: Sequence[int],
    *,
    transport: Transport | None = None,
) -> Run:
    """The library's, as HetFSDP calls it; ended when the shard may be overwritten, too."""
    channel = replace(Channel.of_world(), transport=transport)
    receivers = range(channel.world_size)

    def run() -> None:
        pending = all_gather_uneven(
            output, shard, split_numels, channel=channel, receivers=receivers
        )
        pending.wait()
        pending.wait_sent()

    return run


def our_reduce(
    output: Tensor,  # [split_numels[rank]]
    full: Tensor,  # [sum(split_numels)]
    split_numels: Sequence[int],
    *,
    transport: Transport | None = None,
) -> Run:
    """The library's, as HetFSDP calls it; ended when the input may be overwritten, too."""
    channel, scratch = replace(Channel.of_world(), transport=transport), BufferPool()
    everyone = range(channel.world_size)

    def run() -> None:
        pending = reduce_scatter_uneven(
            output, full, split_numels, channel=channel, contributors=everyone, scratch=scratch
        )
        pending.wait()
        pending.wait_sent()

    return run


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
    promised = (
        ("all-gather", 16, GLOO, 0.85),
        ("all-gather", 128, GLOO, 0.5),
        ("reduce-scatter", 16, GLOO, 0.6),
        ("reduce-scatter", 128, GLOO, 0.4),
        ("all-gather", 128, OURS_EVEN, 1.15),
        ("reduce-scatter", 128, OURS_EVEN, 1.15),
    )
    found = []
    for collective, mib, to, bound in promised:
        uneven, other = (
            spread_of(samples, collective, name, mib).median for name in (OURS_UNEVEN, to)
        )
        words = "gloo's own even" if to == GLOO else "our own even"
        claim = f"{collective}, {mib} MiB: uneven / {words}"
        found.append(Bar(claim=claim, measured=uneven / other, at_most=bound))
    return found


def spread_of(samples: Sequence[Sample], collective: str, variant: str, mib: int) -> Spread:
    """Of one cell of the table."""
    key = (collective, variant, mib)
    return Spread.of(
        [s.slowest_rank_s for s in samples if (s.collective, s.variant, s.total_mib) == key]
    )


if __name__ == "__main__":
    main()
