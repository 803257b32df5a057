"""Plans of one round of 240 problems as they were recorded: a redesign shows what it changes.

``PYTHONPATH=. python -m tests.recorded_plans`` records them anew.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b, sha256
from pathlib import Path

from shardhet.planner import Constraints, PlanError, PlanSolution, solve
from shardhet.planner.problem.constraints import TOLERANCE
from shardhet.pricing.scenario import Scenario
from tests.test_planner import WORKLOAD, random_case

FILE = Path(__file__).parent / "recorded" / "plans.csv"
SEEDS = range(1000, 1240)  # no other test draws them


@dataclass(frozen=True, slots=True)
class RecordedPlan:
    """What the planner said of one problem; of no plan, zeros."""

    seed: int
    step_time_s: float
    lower_bound_s: float
    digest: str  # of the plan as it is saved


def record_of(seed: int) -> RecordedPlan:
    """What the planner says today."""
    cluster, profile, batch = random_case(seed)
    try:
        solution = solve(
            Scenario(cluster, WORKLOAD, profile),
            global_batch_size=batch,
            tolerance=TOLERANCE,
            constraints=Constraints(max_rounds=1),
        )
    except PlanError as error:
        return RecordedPlan(seed, 0.0, 0.0, _digest(str(error)))
    seconds = solution.predicted.step_time_s
    return RecordedPlan(seed, seconds, solution.lower_bound_s, _digest_of(solution))


def _digest_of(solution: PlanSolution) -> str:
    """Of the plan as a file of version 1, which has no rounds."""
    document = json.loads(solution.plan.to_json())
    assert (document.pop("num_rounds"), document.pop("reduce_each_round")) == (1, True)
    assert document.pop("reshard_after_backward")
    text = json.dumps({**document, "version": 1}, indent=1) + "\n"
    return sha256(text.encode()).hexdigest()[:16]


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()


def recorded() -> Iterator[RecordedPlan]:
    """What was recorded, in the order of seeds."""
    with FILE.open(newline="") as file:
        for row in csv.DictReader(file):
            yield RecordedPlan(
                int(row["seed"]),
                float(row["step_time_s"]),
                float(row["lower_bound_s"]),
                row["digest"],
            )


def main() -> None:
    """Write the file."""
    with FILE.open("w", newline="") as file:
        names = [each.name for each in fields(RecordedPlan)]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(record_of(seed)) for seed in SEEDS)


if __name__ == "__main__":
    main()
