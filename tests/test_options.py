"""What HetFSDP is given that it cannot use is refused by the argument's name."""

import copy
import math
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardhet import (
    Cluster,
    ExampleBatch,
    HetFSDP,
    Plan,
    Stage,
    describe,
    mean_of_samples,
    plan_for,
)
from shardhet.records.plan import HoldsFor
from tests.edge_plans import APART
from tests.worlds import ends_all_ranks, on_ranks, run_ranks, run_ranks_expecting_failure

ALONE = Plan.even(1, microbatch_size=2)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"param_dtype": "bfloat16"}, "param_dtype is 'bfloat16' but must be None, torch"),
        ({"param_dtype": torch.complex64}, "param_dtype is torch.complex64"),
        ({"reduce_dtype": torch.int32}, "reduce_dtype is torch.int32"),
        ({"loss_fn": "mse"}, "loss_fn is 'mse' but must be a function"),
        ({"seed": None}, "seed is None but must be a whole number"),
        ({"device": "gpu"}, "device is 'gpu', which is none"),
        ({"batch_dim": -1}, "batch_dim is -1 but must be the dimension"),
        ({"batch_dim": {"input": 0.5}}, r"batch_dim\['input'\] is 0.5 but must be"),
        ({"batch_dim": {"inputs": 1}}, r"'inputs', which is no argument .*mean 'input'\?"),
        ({"units": "0"}, r"Write units=\['0'\]"),
        ({"units": nn.Linear}, r"Write units=\[Linear\]"),
        ({"units": [nn.Linear(3, 3)]}, "neither the name of a module nor a class"),
    ],
)
def test_options_of_a_wrong_type_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        HetFSDP(net(), ALONE, **options)


@pytest.mark.parametrize(
    ("holds_for", "param_dtype", "words"),
    [
        (
            "bfloat16",
            None,
            "param_dtype is float32 but the plan was made for bfloat16",
        ),
        (
            "float32",
            torch.float16,
            "HetTrainer options=.*torch.float32}.*, or plan for torch.float16",
        ),
        ("bfloat16", torch.bfloat16, None),
    ],
)
def test_a_plan_for_another_precision_is_refused(
    holds_for: str, param_dtype: torch.dtype | None, words: str | None
) -> None:
    said = HoldsFor(param_dtype=holds_for, tokens_per_sample=1, num_moments=2)
    plan = replace(ALONE, holds_for=said)
    if words is None:
        assert HetFSDP(net(), plan, param_dtype=param_dtype).plan.holds_for == said
        return
    with pytest.raises(ValueError, match=words):
        HetFSDP(net(), plan, param_dtype=param_dtype)


class Texts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)

    def forward(self, tokens: Tensor) -> tuple[Tensor, int]:
        return self.head(self.embed(tokens)).square().sum(), tokens.numel()


def _step_as_planned_or_not(rank: int) -> None:
    said = HoldsFor(param_dtype="float32", tokens_per_sample=6, num_moments=1)
    plan = replace(Plan.even(2, microbatch_size=1), holds_for=said)
    model = HetFSDP(Texts(), plan, units=[nn.Embedding, nn.Linear])
    for length, words in ((6, None), (7, "tokens_per_sample is 7 .* made for 6"), (8, None)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with torch.no_grad():
                model(torch.ones(1, 99, dtype=torch.long))
            model.forward_backward(torch.ones(1, length, dtype=torch.long))
        found = [str(each.message) for each in caught]
        assert bool(found) == bool(words), found
        assert words is None or re.search(words, *found)
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).step()  # which keeps one
    before = [param.detach().clone() for param in model.parameters()]
    try:
        torch.optim.AdamW(model.parameters()).step()
    finally:
        assert all(map(torch.equal, before, model.parameters()))


def test_a_plan_for_another_optimizer_or_shorter_samples_is_no_surprise() -> None:
    for outcome in run_ranks_expecting_failure(_step_as_planned_or_not, 2):
        assert re.search(
            "AdamW keeps .*num_moments is 2 but .* for 1.*num_moments=2", outcome.message
        )


def test_an_example_without_targets_is_told_where_they_go() -> None:
    with pytest.raises(ValueError, match=r"missing.*'target'.*loss_inputs=\(targets,\)"):
        plan_for(
            net(),
            torch.ones(2, 3),
            "4090",
            global_batch_size=2,
            loss_fn=mean_of_samples(F.cross_entropy),
        )


def test_the_package_alone_has_its_checkpoints() -> None:
    program = "import shardhet; shardhet.checkpoint.save"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_empty_description_of_a_cluster_is_named(tmp_path: Path) -> None:
    (tmp_path / "cards.yaml").touch()
    with pytest.raises(ValueError, match=r"cards.yaml: None but must be an object"):
        Cluster.load(tmp_path / "cards.yaml")


def test_devices_and_dimensions_may_be_said_in_other_ways() -> None:
    model = HetFSDP(net(), ALONE, device="cpu", batch_dim=np.int64(0))
    assert model.device == torch.device("cpu")
    assert model(torch.ones(2, 3)).shape == (2, 3)


def test_inputs_of_another_accelerator_are_refused() -> None:
    elsewhere = torch.ones(2, 3, device="meta")
    with pytest.raises(ValueError, match=r"'input' is on meta but .* trains on cpu. Pass it"):
        HetFSDP(net(), ALONE)(elsewhere)


class Returning(nn.Module):
    """A model that returns what is made of its predictions and targets."""

    def __init__(self, make: Callable[[Tensor, Tensor], Any], width: int = 1) -> None:
        super().__init__()
        self.first, self.head, self.make = nn.Linear(3, 3), nn.Linear(3, width), make

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.make(self.head(self.first(x).tanh()), y)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (F.mse_loss, r"a tensor of shape \(\) without \(loss_sum"),
        (lambda out, _: out[:, 0], r"a tensor of shape \(.,\)"),
        (lambda out, _: {"logits": out}, "a dict"),
        (lambda out, _: (out, out), "a tuple"),
        (lambda out, y: SimpleNamespace(loss=F.mse_loss(out, y)), "a SimpleNamespace"),
    ],
)
def test_what_is_no_sum_with_its_number_is_told_what_to_return(
    make: Callable[[Tensor, Tensor], Any], words: str
) -> None:
    batch, what = (
        (torch.ones(2, 3), torch.ones(2, 1)),
        rf"{words}(.|\n)*return loss_sum, targets",
    )
    with pytest.raises(TypeError, match=f"^the model returns {what}"):
        HetFSDP(Returning(make), ALONE).forward_backward(*batch)
    if words != "a dict":  # which HetTrainer makes a loss of
        with pytest.warns(UserWarning, match=what):
            describe(Returning(make), batch, units=[nn.Linear])


def test_a_loss_without_its_number_is_told_what_to_return() -> None:
    inputs, targets = torch.ones(2, 3), torch.ones(2, 3)
    words = "loss_fn returns a tensor of shape(.|\n)*loss_fn=shardhet.mean_of_samples"
    with pytest.raises(TypeError, match=words):
        HetFSDP(net(), ALONE, loss_fn=F.mse_loss).forward_backward(inputs, loss_inputs=targets)
    batch = ExampleBatch(args=(inputs,), loss_inputs=(targets,))
    with pytest.raises(TypeError, match=words):
        describe(net(), batch, units=[nn.Linear], loss_fn=F.mse_loss)


MEANS: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
    "mse": (F.mse_loss, torch.arange(24).view(8, 3).double()),
    "classes": (F.cross_entropy, torch.tensor([0, -100, 2, 1, -100, -100, 0, 2])),
    "another ignored": (nn.CrossEntropyLoss(ignore_index=1), torch.arange(8) % 3),
}


@pytest.mark.parametrize("kind", MEANS)
@on_ranks(2)
def test_a_mean_over_samples_is_that_of_one_process(rank: int, kind: str) -> None:
    loss_fn, targets = MEANS[kind]
    plan = Plan.by_hand(
        microbatch_sizes=[2, 1], num_microbatches=[1, 2], state_shares=[0.7, 0.3], num_rounds=2
    )
    torch.manual_seed(0)
    module, x = net().double(), torch.randn(8, 3).double()
    plain = copy.deepcopy(module)
    expected = loss_fn(plain(x), targets)
    expected.backward()
    model = HetFSDP(module, plan, units=[nn.Linear], loss_fn=mean_of_samples(loss_fn))
    mine = plan.sample_indices(rank)
    mean = model.forward_backward(x[mine], loss_inputs=targets[mine])
    assert mean == pytest.approx(expected.item(), rel=1e-12)
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    torch.testing.assert_close(model.clip_grad_norm_(1e9), norm, rtol=1e-12, atol=0)


IN_STAGES = Plan.by_hand(
    microbatch_sizes=[1, 2],
    num_rounds=2,
    stages=[Stage(units=("0",), num_ranks=1), Stage(units=("1",), num_ranks=1)],
    state_shares=[1.0, 1.0],
    num_microbatches=[2, 1],
)


def test_a_partial_function_says_what_its_mean_ignores() -> None:
    loss_fn = mean_of_samples(partial(F.cross_entropy, ignore_index=2))
    loss_sum, number = loss_fn(torch.zeros(4, 3), torch.tensor([0, 2, 2, 1]))
    assert number == 2
    assert loss_sum.item() == pytest.approx(2 * math.log(3))


@ends_all_ranks(2, "there are hooks on the HetFSDP")
def test_stages_call_no_hooks_on_the_whole(rank: int) -> None:
    model = HetFSDP(net(), IN_STAGES, units=[nn.Linear], loss_fn=mean_of_samples(F.mse_loss))
    model.register_forward_hook(lambda *_: None)
    x = torch.randn(IN_STAGES.global_batch_size, 3)[IN_STAGES.sample_indices(rank)]
    model.forward_backward(x, loss_inputs=x)


@pytest.mark.parametrize("plan", [APART, IN_STAGES], ids=["apart", "stages"])
@on_ranks()
def test_without_loss_inputs_a_model_predicts(rank: int, plan: Plan) -> None:
    loss_fn = mean_of_samples(nn.CrossEntropyLoss(label_smoothing=0.1))
    torch.manual_seed(0)
    module = net().double()
    plain = copy.deepcopy(module)
    model = HetFSDP(module, plan, units=[nn.Linear], loss_fn=loss_fn)
    mine, n = plan.sample_indices(rank), plan.global_batch_size
    for _ in range(2):  # before its first step, and after it
        x, y = torch.randn(n, 3).double(), torch.arange(n) % 3
        with torch.no_grad():
            predicted = model(x[mine])
        if plan.stages is None or rank == 1:
            torch.testing.assert_close(predicted, plain(x)[mine].detach(), rtol=1e-12, atol=0)
        mean = model.forward_backward(x[mine], loss_inputs=y[mine])
        expected = loss_fn(plain(x), y)[0] / n
        assert mean == pytest.approx(expected.item(), rel=1e-12)


@on_ranks(2)
def test_a_member_of_a_context_group_predicts_its_tokens(rank: int) -> None:
    plan = Plan.by_hand(microbatch_sizes=[2, 2], context_groups=[[0, 1]], token_shares=[2, 1])
    module, x = net(), torch.randn(2, 12, 3)
    plain = copy.deepcopy(module)
    loss_fn = mean_of_samples(nn.CrossEntropyLoss())
    model = HetFSDP(module, plan, units=[nn.Linear], loss_fn=loss_fn)
    with torch.no_grad():
        torch.testing.assert_close(model(x), model.own_tokens(plain(x)))


@pytest.mark.parametrize(
    ("plan", "name"),
    [(APART, "forward"), (APART, "forward_backward"), (IN_STAGES, "forward_backward")],
)
@ends_all_ranks(None, "no loss_inputs are given. Pass the targets as loss_inputs=")
def test_a_loss_without_loss_inputs_is_refused(rank: int, plan: Plan, name: str) -> None:
    model = HetFSDP(net(), plan, units=[nn.Linear], loss_fn=mean_of_samples(F.mse_loss))
    x = torch.ones(len(plan.sample_indices(rank)), 3)
    getattr(model, name)(x, **({"loss_inputs": x} if rank else {}))


class Predicting(nn.Module):
    """Goes on computing with the output of its last unit, in each case in another way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.head, self.kind = nn.Linear(3, 3), nn.Linear(3, 1), kind

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.first(x).tanh())
        if self.kind == "other shape":
            return y.squeeze(-1)
        return (
            F.logsigmoid(y)[:, 0]
            if self.kind == "function"
            else x.sum(-1) + self.first(x)[:, 0]
        )


def _loss_of_what_is_returned(rank: int, kind: str) -> None:
    plan = Plan.by_hand(
        microbatch_sizes=[2, 1, 0],
        num_microbatches=[1, 2, 0],
        state_shares=[0.5, 0.2, 0.3],
        num_rounds=2,
    )
    torch.manual_seed(0)
    is_alone = kind == "a single layer"
    module = (nn.Linear(3, 1) if is_alone else Predicting(kind)).double()
    x, y = torch.randn(8, 3).double(), torch.randn(8, *[1] * is_alone).double()
    plain = copy.deepcopy(module)
    expected = F.mse_loss(plain(x), y)
    expected.backward()
    loss_fn = mean_of_samples(F.mse_loss)
    units = None if is_alone else [nn.Linear]
    model = HetFSDP(module, plan, units=units, loss_fn=loss_fn)
    mine = plan.sample_indices(rank)
    for _ in range(2):
        model.zero_grad()
        mean = model.forward_backward(x[mine], loss_inputs=y[mine])
        assert mean == pytest.approx(expected.item(), rel=1e-12)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        torch.testing.assert_close(model.clip_grad_norm_(1e9), norm, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "kind", ["other shape", "function", "another unit's", "a single layer"]
)
def test_a_loss_is_that_of_what_the_model_returns(kind: str) -> None:
    run_ranks(_loss_of_what_is_returned, 3, kind)
    loss_fn = mean_of_samples(F.binary_cross_entropy_with_logits)  # which broadcasts nothing
    batch = ExampleBatch(args=(torch.rand(2, 3),), loss_inputs=(torch.rand(2),))
    described = describe(Predicting(kind), batch, units=[nn.Linear], loss_fn=loss_fn)
    assert described.kinds[-1].input_bytes > 3 * 4  # its own input's, and what follows the head


def test_a_dimension_that_no_argument_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no argument has the dimension .*5.*\(2, 3\)"):
        HetFSDP(net(), ALONE, batch_dim=5)(torch.ones(2, 3))


def test_what_is_no_module_or_no_plan_is_refused() -> None:
    given: list[tuple[Any, Any, str]] = [
        (torch.relu, ALONE, "is no module"),
        (ALONE, net(), "is no module"),
        (net(), 7, r"Plan.load\(path\)"),
    ]
    for module, plan, words in given:
        with pytest.raises(TypeError, match=words):
            HetFSDP(module, plan)
    with pytest.raises(ValueError, match="wrapped already"):
        HetFSDP(nn.Sequential(HetFSDP(net(), ALONE)), ALONE)


@on_ranks(2)
def test_a_module_is_wrapped_once(rank: int) -> None:
    plan, module = Plan.even(2, microbatch_size=2), net()
    HetFSDP(module, plan)
    with pytest.raises(ValueError, match=r"wrapped already.*redistribute"):
        HetFSDP(module, plan)


class OfOneMemory(nn.Module):
    """Two layers of which one was given the data of the other, or a part of one tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 3), nn.Linear(3, 4)
        whole = torch.rand(4, 6)
        if kind == "transposed":
            self.decoder.weight.data = self.encoder.weight.data.T
        if kind == "buffer":
            self.register_buffer("start", self.encoder.weight.data)
        if kind == "rows":
            self.decoder.weight.data = whole[:, :3]
            self.encoder.bias.data = whole[1, 2:5]
        if kind == "columns apart":
            self.decoder.weight.data = whole[:, :3]
            self.encoder.weight.data = whole[:, 3:].T
        if kind == "frozen":
            self.decoder.weight.data = self.encoder.weight.data.T
            self.requires_grad_(False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", ["transposed", "buffer", "rows"])
def test_parameters_that_share_memory_without_being_one_are_refused(
    kind: str, device: str
) -> None:
    with torch.device(device):
        module = OfOneMemory(kind)
    with pytest.raises(ValueError, match="have the same memory"):
        HetFSDP(module, ALONE)


@pytest.mark.parametrize("kind", ["columns apart", "frozen"])
def test_tensors_in_one_storage_may_be_apart_or_frozen(kind: str) -> None:
    HetFSDP(OfOneMemory(kind), ALONE)
