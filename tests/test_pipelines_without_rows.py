"""Pipelines that hand over tensors without samples, and that drop out outside of units."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardhet import HetFSDP, Plan, Stage
from tests.selection import one_in
from tests.test_pipelines import SEQ_LEN, WIDTH, WORDS, batch_of
from tests.test_pipelines import check_steps as check_steps_of_one_process
from tests.worlds import on_ranks, run_ranks, run_ranks_expecting_failure

UNITS = ("embedding", "positions", "blocks.0", "blocks.1", "head")


class Placed(nn.Module):
    """Has learned positions; what becomes of them is ``way``."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Sequential(
            nn.Embedding(SEQ_LEN, WIDTH), nn.Dropout(0.5 if way == "random" else 0.0)
        )
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.dropout = nn.Dropout(0.5 if "dropout" in way else 0.0)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(inputs)
        if self.way == "written in place":
            x *= 2.0
        places = torch.arange(SEQ_LEN)[None]
        if self.way == "computed from samples":
            places = places + 0 * inputs.min()
        if self.way == "samples were read":
            places = places * (min(map(min, inputs.tolist())) >= 0)
        table = self.positions(places)
        x = x + table
        dropped = nn.functional.dropout(x) if self.way == "function" else self.dropout(x)
        x = self.blocks[0](dropped).tanh()
        x = self.blocks[1](x + table).tanh()  # once more, on the last stage
        if self.way == "dropout that is used twice":
            x = x + dropped
        logits = self.head(x).flatten(0, 1)
        loss = nn.functional.cross_entropy(
            logits, targets.flatten(), ignore_index=-1, reduction="sum"
        )
        return loss, (targets >= 0).sum()


def staged(numbers: Sequence[int], sizes: Sequence[int], cuts: Sequence[int]) -> Plan:
    borders = [0, *cuts, len(UNITS)]
    stages = [
        Stage(units=UNITS[borders[i] : borders[i + 1]], num_ranks=number)
        for i, number in enumerate(numbers)
    ]
    return Plan.by_hand(
        microbatch_sizes=[min(2, size) for size in sizes],
        rank_batch_sizes=sizes,
        num_rounds=3,
        stages=stages,
    )


def _steps(rank: int, plan: Plan) -> None:
    torch.manual_seed(0)
    module = Placed("").double()
    both = check_steps_of_one_process(module, plan, units=UNITS)
    own = both.part(*batch_of(plan.global_batch_size))
    with torch.no_grad():
        loss, number = both.model(*own)
        expected = module(*own)
    if rank in plan.groups[-1] and len(own[0]):
        assert number == expected[1]
        assert float(loss) == pytest.approx(float(expected[0]), rel=1e-12)


@pytest.mark.parametrize(
    "numbers, sizes, cuts",
    one_in(
        3,
        [
            ([2, 1], [1, 3, 4], [2]),
            ([1, 2], [4, 3, 1], [2]),  # gradients of two ranks are added
            ([1, 2], [4, 4, 0], [3]),  # and the last one only stores
            ([2, 2], [1, 3, 2, 2], [3]),
            ([1, 1, 1], [4, 4, 4], [2, 3]),  # handed on
            ([1, 2, 1], [4, 2, 2, 4], [2, 3]),
        ],
    ),
)
def test_tensors_without_samples_are_handed_over(
    numbers: list[int], sizes: list[int], cuts: list[int]
) -> None:
    run_ranks(_steps, len(sizes), staged(numbers, sizes, cuts))


@pytest.mark.sampled
@pytest.mark.parametrize("way", ["dropout", "function"])
@pytest.mark.parametrize("cut", [1, 2, 3])
@on_ranks(3)
def test_dropout_outside_of_units_draws_as_without_stages(
    rank: int, way: str, cut: int
) -> None:
    plan = staged([1, 2], [4, 2, 2], [cut])
    torch.manual_seed(0)
    module = Placed(way).double()
    flat = Plan.by_hand(microbatch_sizes=[2], rank_batch_sizes=[4], num_rounds=3)
    alone = dist.new_group([rank], use_local_synchronization=True)
    in_stages = HetFSDP(copy.deepcopy(module), plan, units=UNITS, seed=3)
    whole = HetFSDP(copy.deepcopy(module), flat, units=UNITS, seed=3, group=alone)
    for step in range(3):
        inputs, targets = batch_of(12, step)
        mine = plan.sample_indices(in_stages.position)
        mean = in_stages.forward_backward(inputs[mine], targets[mine])
        expected = whole.forward_backward(inputs, targets)
        assert mean == pytest.approx(expected, rel=1e-14)
        boxes = in_stages.sharded_state_dict()
        for (fqn, own), other in zip(
            in_stages.named_parameters(), whole.parameters(), strict=True
        ):
            if own.grad is not None and own.numel():
                rows = boxes[fqn].rows
                error = own.grad.as_subclass(Tensor) - other.grad[rows.start : rows.stop]  # type: ignore[index]
                assert error.abs().max() < 1e-14
        in_stages.zero_grad()
        whole.zero_grad()


def _refused(rank: int, way: str) -> None:
    plan = staged([2, 1], [2, 2, 4], [1 if way == "written in place" else 3])
    model = HetFSDP(Placed(way), plan, units=UNITS)
    inputs, targets = batch_of(12)
    mine = plan.sample_indices(model.position)
    model.forward_backward(inputs[mine], targets[mine])


REFUSED: dict[str, Any] = {
    "computed from samples": "'positions' returns a tensor without a row for each sample",
    "samples were read": "'positions' returns a tensor without a row for each sample",
    "random": "'positions' returns a tensor without a row for each sample",
    "written in place": "code outside of units writes to what unit 'embedding' has returned",
    "dropout that is used twice": "dropout outside of units is used in stages [0, 1]",
}


@pytest.mark.parametrize("way", one_in(2, REFUSED))
def test_what_may_differ_between_ranks_is_refused(way: str) -> None:
    for outcome in run_ranks_expecting_failure(_refused, 3, way):
        assert outcome.exception_name is not None
        assert REFUSED[way] in outcome.message
