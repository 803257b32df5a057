"""``shardhet train optim=muon``: matrices are whole on uneven ranks."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardhet.records.plan import EVERY_BLOCK
from tests.test_rebalancing import EVEN, slow_down
from tests.test_worker import SHORT_TEXT, configure, train_rank, write_pages
from tests.worlds import run_ranks, run_ranks_expecting_failure

NUM_RANKS = 3
MUON = (*SHORT_TEXT, "optim=muon", "num_steps=4", "cluster.num_ranks=3", "plan=by_hand")
UNEVEN = ("plan.microbatch_sizes=[4,0,2]", "plan.state_shares=[0.4,0.6,0.0]")
UNEVEN += ("plan.num_microbatches=[1,0,1]", "cluster.kinds=[a,b,c]")
WHOLE = "plan.whole_matrices=true"


def losses(folder: Path, num_ranks: int, *overrides: str) -> np.ndarray:
    run_ranks(train_rank, num_ranks, [configure(folder, *overrides)] * num_ranks)
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return np.array([each["loss"] for each in entries if "loss" in each])


@pytest.mark.parametrize("precision", ["FP32", "FP16"])
def test_losses_are_those_of_one_device(precision: str, tmp_path: Path) -> None:
    write_pages(tmp_path / "pages")
    of_both = (*MUON, f"data.path={tmp_path}/pages", f"precision={precision}", WHOLE)
    alone = ("cluster.num_ranks=1", "plan.microbatch_sizes=[6]")
    found = losses(tmp_path / "three", NUM_RANKS, *of_both, *UNEVEN)
    expected = losses(tmp_path / "alone", 1, *of_both, *alone)
    assert found[-1] < found[0]
    # Muon rounds to bfloat16 what ranks add up in other orders.
    np.testing.assert_allclose(found, expected, rtol=1e-4 if precision == "FP32" else 2e-2)


def test_a_plan_that_cuts_matrices_is_refused(tmp_path: Path) -> None:
    write_pages(tmp_path / "pages")
    keys = (*MUON, f"data.path={tmp_path}/pages", *UNEVEN)
    paths = [configure(tmp_path / "three", *keys)] * NUM_RANKS
    for outcome in run_ranks_expecting_failure(train_rank, NUM_RANKS, paths):
        assert "under a plan with whole_matrices=True" in outcome.message, outcome.traceback


def test_a_plan_that_is_made_anew_for_a_slow_device_has_owners_again() -> None:
    plan = replace(EVEN, whole_matrices=EVERY_BLOCK)
    for course in run_ranks(slow_down, plan.world_size, plan, True):
        assert course.found[0][1].new_plan is not None
        assert course.plan.whole_matrices == EVERY_BLOCK
        assert sum(each.number for rank in course.plan.ranks for each in rank.owned or ()) == 3


def test_a_plan_that_is_made_at_the_start_has_owners_for_muon(tmp_path: Path) -> None:
    write_pages(tmp_path / "pages")
    keys = (*MUON[:-2], f"data.path={tmp_path}/pages", "plan=measured", "cluster.kinds=[a,b]")
    keys += ("plan.global_batch_size=4", "plan.max_microbatch_size=2", "plan.time_limit_s=1")
    found = losses(tmp_path / "two", 2, *keys)
    assert len(found) == 4
    assert found[-1] < found[0]
