"""An input that only has the batch's length is never split by mistake."""

import pytest
import torch
from torch import Tensor, nn

from shardhet import HetFSDP, Plan
from shardhet.fsdp.batching import BatchProvenance

BATCH = 4
WIDTH = 6
FOUR_SINGLES = Plan.by_hand(microbatch_sizes=[1], rank_batch_sizes=[BATCH], state_shares=[1.0])


class Mixer(nn.Module):
    """Mixes positions by a matrix, and adds a state per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x_BTD: Tensor, mix_TT: Tensor, state_BD: Tensor) -> Tensor:
        return torch.tanh(mix_TT @ self.linear(x_BTD)) + state_BD[:, None]


class Net(nn.Module):
    """Makes the matrix and the state itself, in one of several ways."""

    def __init__(self, state: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mixer() for _ in range(2)])
        self._state = state

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, num_positions, width = x_BTD.shape
        mix_TT = torch.ones(num_positions, num_positions, dtype=x_BTD.dtype).tril()
        states = {
            "derived": torch.zeros_like(x_BTD[:, 0]) + 1,
            "expanded": torch.ones(width, dtype=x_BTD.dtype).expand(batch, width),
            "made": torch.ones(batch, width, dtype=x_BTD.dtype),
        }
        for layer in self.layers:
            x_BTD = layer(x_BTD, mix_TT, states[self._state])
        return x_BTD


def losses(state: str, num_positions: int, **options: list[str]) -> tuple[float, float]:
    """Of the wrapped and of the plain model."""
    torch.manual_seed(0)
    net = Net(state)
    x_BTD = torch.randn(BATCH, num_positions, WIDTH, dtype=torch.float64)
    plain = net(x_BTD).sum().item()
    model = HetFSDP(net, FOUR_SINGLES, **options)
    loss = model.backward(model(x_BTD).sum(), 1)
    assert loss is not None
    return loss, plain


@pytest.mark.parametrize("state", ["derived", "expanded"])
def test_a_mask_of_another_length_is_passed_whole(state: str) -> None:
    wrapped, plain = losses(state, num_positions=5)
    assert wrapped == pytest.approx(plain, rel=1e-12)


@pytest.mark.parametrize("state", ["derived", "expanded"])
def test_a_mask_as_long_as_the_batch_is_refused_until_it_is_named(state: str) -> None:
    with pytest.raises(ValueError, match=r"'layers.0'.*\(4, 4\).*unbatched="):
        losses(state, num_positions=BATCH)
    wrapped, plain = losses(state, num_positions=BATCH, unbatched=["mix_TT"])
    assert wrapped == pytest.approx(plain, rel=1e-12)


def test_a_state_made_from_nothing_is_refused_until_it_is_named() -> None:
    with pytest.raises(ValueError, match=r"\(4, 6\).*batched="):
        losses("made", num_positions=5)
    wrapped, plain = losses("made", num_positions=5, batched=["state_BD"])
    assert wrapped == pytest.approx(plain, rel=1e-12)


def test_what_is_computed_from_the_batch_is_known() -> None:
    x_BTD = torch.randn(BATCH, BATCH, WIDTH, requires_grad=True)
    table = torch.randn(5, WIDTH, requires_grad=True)
    ids_BT = torch.randint(0, 5, (BATCH, BATCH))
    provenance = BatchProvenance()
    provenance.mark((x_BTD, ids_BT))
    with provenance:
        derived = [
            x_BTD + 1,
            x_BTD.view(BATCH, -1),
            x_BTD[:, 0],
            x_BTD.detach(),
            nn.functional.embedding(ids_BT, table),
            nn.functional.layer_norm(x_BTD, (WIDTH,)),
            (ids_BT != 0)[:, None],
        ]
        unrelated = [torch.ones(4, 4).tril(), x_BTD.new_ones(4, 4), torch.arange(4), table[:4]]
    assert all(map(provenance.knows, derived))
    assert not any(map(provenance.knows, unrelated))


def test_a_weight_used_outside_of_its_unit_is_refused() -> None:
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

        def forward(self, x_BD: Tensor) -> Tensor:
            x_BD = self.layers[1](self.layers[0](x_BD))
            return x_BD.sum() + self.layers[0].weight.square().sum()

    model = HetFSDP(Leaky(), FOUR_SINGLES)
    with pytest.raises(RuntimeError, match=r"layers.0.weight is used outside"):
        model.backward(model(torch.randn(BATCH, WIDTH)), BATCH)
