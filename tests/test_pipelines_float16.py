"""Steps of pipelines in float16: what overflows in one stage is left out by all."""

import copy

import pytest
import torch
from torch import Tensor, nn

from shardhet import HetFSDP
from tests.beside import mean_of
from tests.emulated.accelerator import Accelerator
from tests.parity import OnHost
from tests.test_guard import Scaled
from tests.test_pipelines import WORDS, batch_of, staged
from tests.worlds import run_ranks

PLAN = staged([1, 1, 2], [2, 1], num_rounds=3)
WIDTH = 8
NUM_STEPS, BAD_STEP = 5, 2
FIRST_SCALE = 2.0**10


class Layer(nn.Module):
    """One whose gradient is multiplied by ``factor``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Scaled.apply(x + self.linear(x).tanh(), self.factor)
        return y


class Net(nn.Module):
    """Its loss is a sum in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        logits, labels = self.head(x).float().flatten(0, 1), targets.flatten()
        loss = nn.functional.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
        return loss, (targets >= 0).sum()


def _train(rank: int, culprit: int, on_accelerators: bool) -> list[tuple[float | None, float]]:
    """The mean loss and the scale after each step."""
    torch.manual_seed(0)
    place: Accelerator | OnHost = Accelerator() if on_accelerators else OnHost()
    net = Net()
    assert PLAN.stages is not None
    stage = PLAN.stages[[culprit in each for each in PLAN.groups].index(True)]
    with place.installed():
        model = HetFSDP(net, PLAN, param_dtype=torch.float16, device=place.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        scaler = torch.amp.GradScaler(place.device.type, init_scale=FIRST_SCALE)
        seen = []
        for step in range(NUM_STEPS):
            for i, block in enumerate(net.blocks):
                is_bad = step == BAD_STEP and stage.has(f"blocks.{i}")
                block.factor = 1e6 if is_bad else 1.0
            before = [p.detach().clone() for p in model.parameters()]
            given = batch_of(PLAN.global_batch_size, step)
            mine = PLAN.sample_indices(model.position)
            inputs, targets = (each[mine].to(place.device) for each in given)
            mean = model.forward_backward(inputs, targets, scaler=scaler)
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            kept = [torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
            assert all(kept) == (step == BAD_STEP)
            seen.append((mean, scaler.get_scale()))
        return seen


def _plainly() -> list[float]:
    """The losses of one process in float32 that leaves out the same step."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    means = []
    for step in range(NUM_STEPS):
        before = copy.deepcopy(net.state_dict())
        means.append(mean_of(net, *batch_of(PLAN.global_batch_size, step)))
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == BAD_STEP:
            net.load_state_dict(before)
    return means


@pytest.mark.sampled(1)
@pytest.mark.parametrize("on_accelerators", [False, True])
@pytest.mark.parametrize("culprit", [0, 2])
def test_what_overflows_in_one_stage_is_left_out_by_all(
    culprit: int, on_accelerators: bool
) -> None:
    expected = _plainly()
    for seen in run_ranks(_train, 3, culprit, on_accelerators):
        means, scales = zip(*seen, strict=True)
        assert means == pytest.approx(expected, rel=0.01)
        assert scales == tuple(
            FIRST_SCALE / (2 if step >= BAD_STEP else 1) for step in range(NUM_STEPS)
        )
