"""Plans for cards that are not here run on CPU processes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardhet import DeviceSpec, HetFSDP, Plan
from tests.programs import SHARDHET, run
from tests.worlds import ends_all_ranks, on_ranks

CARDS = [
    DeviceSpec(host="tower", kind="NVIDIA GeForce RTX 4090", memory_capacity_bytes=24 * 2**30),
    DeviceSpec(host="old", kind="Tesla T4", memory_capacity_bytes=16 * 2**30),
]
PLAN = Plan.by_hand(microbatch_sizes=[3, 1], devices=CARDS)


@on_ranks(2)
def test_a_plan_for_cards_runs_on_processes_that_stand_in_for_them(rank: int) -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(4, 1).double(), torch.arange(16.0).view(4, 4).double()
    expected = module(x).mean().item()
    model = HetFSDP(module, PLAN, rehearse=True)
    mine = PLAN.sample_indices(model.position)
    output: Tensor = model(x[mine])
    assert model.backward(output.sum(), len(mine)) == pytest.approx(expected, rel=1e-12)
    assert model.position == rank
    assert model.device == torch.device("cpu")


@ends_all_ranks(2, "shardhet rehearse PROGRAM --plan plan.json", "rehearse=True")
def test_devices_that_do_not_fit_are_told_of_it(rank: int) -> None:
    HetFSDP(nn.Linear(4, 1), PLAN)


PROGRAM = """
import sys, torch, torch.distributed as dist
from torch import nn
from shardhet import HetFSDP, Plan

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.fails = nn.Linear(4, 4), nn.Linear(4, 1), False

    def forward(self, x):
        if self.fails:
            raise KeyError("one of the user's")
        return self.b(self.a(x))[:, 0].sum(), len(x)

dist.init_process_group()
plan = Plan.load("plan.json")
torch.manual_seed(0)
model = HetFSDP(Model(), plan)
x = torch.arange(16.0).view(4, 4)[plan.sample_indices(model.position)]
model.forward_backward(x)
print(f"arguments {sys.argv[1:]}", flush=True)
model.fails = model.position == 0
model.forward_backward(x)
"""


RAISE = next(line for line in PROGRAM.splitlines() if "raise" in line)


def test_a_program_is_rehearsed_as_it_is_and_its_failure_shown_without_internals(
    tmp_path: Path,
) -> None:
    PLAN.save(tmp_path / "plan.json")
    (tmp_path / "program.py").write_text(PROGRAM)
    rehearse = [*SHARDHET, "rehearse", "program.py", "--plan", "plan.json"]
    done = run([*rehearse, "--lr", "3"], tmp_path)
    assert done.returncode == 1
    assert done.stdout.count("arguments ['--lr', '3']") == 2
    lines = done.stderr.splitlines()
    assert len(lines) < 40, done.stderr
    for part in ("neighbours", "channel", "shardhet/", "LostPeerError", "torch/nn/modules"):
        assert part not in done.stderr, done.stderr
    # The last lines of a rank, the one that failed too.
    of_rank = [[line for line in lines if f"[rank{rank}]" in line] for rank in range(2)]
    assert 'KeyError: "one of the user\'s"' in of_rank[0][-2]
    assert "RTX 4090 24.0 GiB on tower) failed in" in of_rank[0][-1]
    assert "RTX 4090 24.0 GiB on tower) failed in" in of_rank[1][-2]
    assert "the run failed" in done.stderr
    assert f"program.py:{PROGRAM.splitlines().index(RAISE) + 1}" in done.stderr
    wrong = run([*SHARDHET, "rehearse", "program.py", "--plan", "no.json"], tmp_path)
    assert (wrong.returncode, "no.json" in wrong.stderr) == (2, True)
