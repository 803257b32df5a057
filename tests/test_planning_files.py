"""Spoiled cluster, workload and profile files: a clear error, or a plan that keeps its word."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from shardhet.planner import solve
from shardhet.pricing.derive import derive_profile
from shardhet.pricing.scenario import Scenario
from shardhet.records.cluster import Cluster
from shardhet.records.profiles import Profile
from shardhet.records.workload import Workload
from tests.selection import one_in

CLUSTER = Cluster.load(
    Path(__file__).parent.parent / "conf" / "cluster" / "described" / "rtx4090_2x3090.yaml"
)
WORKLOAD = Workload.transformer(
    num_layers=2, width=64, num_heads=2, seq_len=32, vocab_size=100, param_dtype="bfloat16"
)
DOCUMENTS = {
    "cluster": json.loads(CLUSTER.to_json()),
    "workload": json.loads(WORKLOAD.to_json()),
    "profile": json.loads(derive_profile(CLUSTER, WORKLOAD).to_json()),
}
JUNK: tuple[Any, ...] = (
    None, True, "", "many", -1, 0, 0.5, -0.0, 1e-320, 1e308, 10**400, float("nan"),
    float("inf"), [], [[]], {}, {"a": 1}, [-1, 0], "block", 3,
)  # fmt: skip
NUM_MUTATIONS = 700
SEED = 0


def places(entry: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything inside a document."""
    inner = (
        entry.items()
        if isinstance(entry, dict)
        else enumerate(entry)
        if isinstance(entry, list)
        else ()
    )
    found = [path] if path else []
    for key, each in inner:
        found += places(each, (*path, key))
    return found


def spoil(document: Any, rng: random.Random) -> Any:
    """The document with one place deleted, doubled, renamed or replaced."""
    spoiled = copy.deepcopy(document)
    path = rng.choice(places(document))
    holder = spoiled
    for key in path[:-1]:
        holder = holder[key]
    key = path[-1]
    action = rng.choice(["replace", "replace", "replace", "scale", "delete", "rename"])
    if action == "delete":
        del holder[key]
    elif action == "rename" and isinstance(holder, dict):
        holder[f"{key}_"] = holder.pop(key)
    elif action == "scale" and isinstance(holder[key], int | float):
        holder[key] *= rng.choice([-1, 0, 1e-9, 1e9, 1000])
    else:
        holder[key] = rng.choice(JUNK)
    return spoiled


@pytest.mark.parametrize("which", one_in(3, sorted(DOCUMENTS)))
def test_a_spoiled_file_is_refused_by_name_or_gives_a_true_plan(which: str) -> None:
    rng = random.Random(f"{which} {SEED}")
    num_refused = 0
    for _ in range(NUM_MUTATIONS // len(DOCUMENTS) + 1):
        refusal = refusal_of({**DOCUMENTS, which: spoil(DOCUMENTS[which], rng)})
        begins = (f"{which}.json", "cluster:", "workload:", "profile:", "plan:")
        assert refusal == "" or refusal.startswith(begins)
        num_refused += refusal != ""
    assert num_refused > 100


def refusal_of(documents: dict[str, Any]) -> str:
    """What the error says; empty where there is a plan, which then keeps its promises."""
    try:
        cluster = Cluster.from_document(documents["cluster"], source="cluster.json")
        workload = Workload.from_document(documents["workload"], source="workload.json")
        profile = Profile.from_document(documents["profile"], source="profile.json")
        solution = solve(Scenario(cluster, workload, profile), global_batch_size=12)
    except ValueError as error:
        return str(error)
    assert solution.plan.global_batch_size == 12
    assert all(rank.fits for rank in solution.predicted.ranks)
    assert solution.lower_bound_s <= solution.predicted.step_time_s * (1 + 1e-9)
    return ""
