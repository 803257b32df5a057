"""Copies between host and device; where they are one, nothing is copied."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from shardhet import HetFSDP, Plan
from shardhet.comm.calls import HostCopy
from shardhet.fsdp.microbatch.loss import warn_of_large_output
from shardhet.fsdp.step import mean_loss
from shardhet.fsdp.step.around import Activity


def test_losses_set_out_before_backward_and_are_read_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[str] = []

    class Noted(HostCopy):
        def __init__(self, tensor: Tensor) -> None:
            happened.append("copied")
            super().__init__(tensor)

        def read(self) -> Tensor:
            happened.append("read")
            return super().read()

    monkeypatch.setattr(mean_loss, "HostCopy", Noted)
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model = HetFSDP(layers, Plan.even(1, microbatch_size=3), units=[nn.Linear])
    model.add_observer(
        lambda event: (
            happened.append(event.activity.value)
            if event.activity is Activity.BACKWARD
            else None
        )
    )
    x = torch.ones(3, 2)
    output = model(x)
    assert model.backward(output.sum(), 3) == pytest.approx(float(output.detach().mean()))
    assert happened == ["copied", "backward", "backward", "read"]


@pytest.mark.parametrize("mib", [200, 300])
def test_logits_of_a_whole_batch_are_warned_of(mib: int) -> None:
    logits = torch.empty(mib * 2**20, dtype=torch.uint8, device="meta")
    expected = pytest.warns(UserWarning, match="300 MiB") if mib > 256 else nullcontext()
    with warnings.catch_warnings(), expected:
        warnings.simplefilter("error" if mib < 256 else "always")
        warn_of_large_output([logits])
