"""``import shardhet`` stays light, and the planning side works where torch is not installed."""

import re
import subprocess
import sys
from pathlib import Path

import shardhet

ROOT = Path(__file__).parent.parent

# Put before what a case runs: an environment without these packages.
BLOCK = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "hydra", "omegaconf"}:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)

sys.meta_path.insert(0, Absent())
"""

PLAN_BY_HAND = """
import shardhet, shardhet.records.layout, shardhet.records.plan, shardhet.records.cluster
from shardhet.records.plan import Plan

plan = Plan.by_hand(microbatch_sizes=[4, 2], num_microbatches=[3, 1], state_shares=[0.75, 0.25])
assert Plan.from_json(plan.to_json()) == plan
print(plan.global_batch_size)
"""

PLAN_BY_SEARCH = """
from shardhet import Cluster, Scenario, Workload, find_plan, simulate
from shardhet.pricing.derive import derive_profile

cluster = Cluster.load("conf/cluster/described/rtx4090_2x3090.yaml")
workload = Workload.transformer(
    num_layers=4, width=256, num_heads=4, seq_len=128, vocab_size=1000, param_dtype="bfloat16"
)
profile = derive_profile(cluster, workload)
scenario = Scenario(cluster, workload, profile)
plan = find_plan(scenario, global_batch_size=30)
print(plan.global_batch_size, simulate(plan, scenario).step_time_s > 0)
"""

PLANNED_FOR = """
import os, sys, types

def answer(*_):
    heavy = {"shardhet.planner.find", "shardhet.pricing.cost", "scipy", "torch"}
    os.write(1, str(sorted(heavy & set(sys.modules))).encode())
    os._exit(0)  # what was not flushed is lost

sys.modules["shardhet.apps.planning.answering"] = types.SimpleNamespace(answer=answer)
from shardhet.apps.plan import main

main(["cluster=rtx4090_2x3090", "model=gpt_125m"])
"""

LOADED = """
import sys
print(sorted({"torch", "scipy", "numpy", "hydra", "omegaconf"} & set(sys.modules)))
"""


def test_groups_are_made_in_one_place() -> None:
    """Where they are made without splitting the world's, which ranks outside would wait for."""
    makers = re.compile(r"\.(new_group|new_subgroups\w*|split_group|_new_process_group\w*)\(")
    rooms = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "shardhet").rglob("*.py"))
        if makers.search(path.read_text())
    ]
    assert rooms == ["shardhet/comm/groups.py"]


def run_python(code: str) -> str:
    """What a new interpreter prints when it runs ``code`` in the repository root."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_block_does_block() -> None:
    code = "try:\n    import torch.distributed\nexcept ModuleNotFoundError as e:\n    print(e)"
    assert run_python(BLOCK + code) == "No module named 'torch' (blocked)"


def test_a_plan_is_written_and_read_without_torch() -> None:
    assert run_python(BLOCK + PLAN_BY_HAND) == "14"


def test_a_plan_is_found_and_simulated_without_torch() -> None:
    assert run_python(BLOCK + PLAN_BY_SEARCH) == "30 True"


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert run_python("import shardhet" + LOADED) == "[]"


def test_what_is_planned_for_is_said_before_the_search_is_imported() -> None:
    first, _, loaded = run_python(PLANNED_FOR).splitlines()
    assert first.startswith("gpt_125m: 162,")
    assert loaded == "[]"


def test_the_public_names_are_listed() -> None:
    assert dir(shardhet) == sorted(shardhet._MODULE_BY_NAME) == sorted(shardhet.__all__)


def test_records_and_prices_import_numpy_and_nothing_heavier() -> None:
    assert (
        run_python(
            "from shardhet.records import cluster, layout, plan, profiles, schedule, workload\n"
            "import shardhet.pricing.cost, shardhet.simulator.simulation" + LOADED
        )
        == "['numpy']"
    )
