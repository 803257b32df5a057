"""A model that counts its own forwards counts them on ranks without samples too."""

import pytest
import torch
from torch import Tensor

from shardhet import HetFSDP, Plan
from tests.edge_plans import every_plan
from tests.ordinary import WIDTH, Block, Net
from tests.parity import compare_grads, part_of
from tests.worlds import on_ranks


class Annealed(Net):
    """Scales its output by how often it was called before."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
        self.num_calls = getattr(self, "num_calls", 0) + 1
        loss, num = super().forward(x, y)
        return loss / self.num_calls, num


@every_plan
@on_ranks()
def test_ranks_without_samples_count_as_the_others(rank: int, plan: Plan) -> None:
    torch.manual_seed(3)
    plain, module = Annealed(), Annealed()
    module.load_state_dict(plain.state_dict())
    model = HetFSDP(module, plan, units=[Block, "head"])
    full = [each.rank_batch_size for each in plan.ranks]
    last_has_none = [*full[:-1], 0] if len(full) > 1 else full
    units = dict.fromkeys((fqn for fqn, _ in plain.named_parameters()), "all")
    for step, sizes in enumerate((last_has_none, full, last_has_none, full)):
        batch = {
            "x": torch.randn(sum(sizes), WIDTH, dtype=torch.float64),
            "y": torch.randn(sum(sizes), 3, dtype=torch.float64),
        }
        mean = model.backward(*model(**part_of(batch, sizes, model.position)))
        loss, num = plain(**batch)
        (loss / num).backward()
        assert mean == pytest.approx(float(loss) / num, rel=1e-12)
        compare_grads(model, plain, units, where=f"step {step}")
        assert module.num_calls == plain.num_calls == step + 1
        plain.zero_grad(), model.zero_grad()
