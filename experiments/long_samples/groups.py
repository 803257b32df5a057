"""Drawn plans with context groups beside one process, and repeats bit by bit.

python -m experiments.long_samples.groups 0 200
"""

import sys
import time
import traceback

import torch

from tests.context_cases import Case
from tests.worlds import run_ranks


def run_twice(rank: int, seed: int) -> str:
    """What was run; raises if it is not that of one process, or a repeat has other bits."""
    case = Case.drawn(seed)
    first, second = (
        [p.detach().as_subclass(torch.Tensor).clone() for p in case.run().parameters()]
        for _ in range(2)
    )
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert same, "a repeat has other bits"
    groups, sizes = case.plan.context_groups, [r.microbatch_sizes for r in case.plan.ranks]
    return f"{case.model}, {case.num_tokens} tokens, groups {groups}, microbatches {sizes}"


def main(first: int, last: int) -> None:
    failed = []
    for seed in range(first, last):
        world_size, started = Case.drawn(seed).plan.world_size, time.monotonic()
        try:
            said = run_ranks(run_twice, world_size, seed)[0]
        except BaseException as error:  # pytest's own failures are no Exceptions
            if isinstance(error, KeyboardInterrupt):
                raise
            failed.append(seed)
            said = f"FAILED {Case.drawn(seed)}\n{''.join(traceback.format_exception(error))}"
        print(f"{seed}: {said} ({time.monotonic() - started:.1f} s)", flush=True)
    print(f"{last - first - len(failed)} of {last - first} are exact; not: {failed}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
