"""Text drawn from a sharded decoder is the text that one process draws."""

import pytest
import torch

from shardhet import HetFSDP, Plan
from shardhet.models.decoder import Decoder
from shardhet.training.sampling import sample_tokens
from tests.small_models import small_decoder
from tests.worlds import run_ranks

MODEL = small_decoder(num_layers=1, hidden_width=16)


def sample_rank(rank: int, plan: Plan) -> tuple[list[int], bool]:
    torch.manual_seed(0)
    model = HetFSDP(Decoder(MODEL).double(), plan)
    text = sample_tokens(model, b"import", 12, seq_len=MODEL.seq_len)
    return text, model.training


@pytest.mark.parametrize(
    "plan",
    [
        Plan.even(2, microbatch_size=2),
        Plan.by_hand(microbatch_sizes=[0, 1, 2], state_shares=[0.5, 0.5, 0]),
    ],
    ids=["even", "the first only stores"],
)
def test_the_text_does_not_depend_on_the_plan(plan: Plan) -> None:
    [alone] = run_ranks(sample_rank, 1, Plan.even(1, microbatch_size=1))
    assert len(alone[0]) == 12
    assert run_ranks(sample_rank, plan.world_size, plan) == [alone] * plan.world_size
