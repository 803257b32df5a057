"""Whatever is wrong on one rank ends every rank within seconds, with a message that helps.

A rank that raises stays alive and silent in these tests, so its peers must learn of it from
the library and not from the end of its process.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardhet import DeviceSpec, HetFSDP, Plan
from shardhet.records.plan import PlannedUnit
from tests.misdeeds import Trap
from tests.worlds import Outcome, ends_all_ranks, on_ranks

WIDTH = 4
WITHIN_S = 10.0
HOSTS = ("alpha", "beta", "gamma")

# Ranks 0 and 1 compute, rank 2 only stores; rank 0 computes and stores nothing.
PLAN = Plan.by_hand(
    microbatch_sizes=[1, 2, 0], num_microbatches=[2, 1, 0], state_shares=[0.0, 0.4, 0.6]
)
# The same with rank 0 playing the last entry, so that ranks and positions differ.
TURNED = Plan.by_hand(
    microbatch_sizes=[1, 2, 0],
    num_microbatches=[2, 1, 0],
    state_shares=[0.0, 0.4, 0.6],
    devices=[DeviceSpec(host=host) for host in ("beta", "gamma", "alpha")],
)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=torch.float64)
        self.in_forward: Callable[[], None] = lambda: None
        self.in_backward: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.in_forward()
        y: Tensor = Trap.apply(x + self.linear(x).tanh(), self.in_backward)
        return y


class Net(nn.Module):
    def __init__(self, num_layers: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(width) for _ in range(num_layers)])
        self.visits = list(range(num_layers))

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        for i in self.visits:
            x = self.layers[i](x)
        return x.square().sum(), len(x)

    def layer(self, i: int) -> Layer:
        layer = self.layers[i]
        assert isinstance(layer, Layer)
        return layer


def wrap(rank: int, plan: Plan = PLAN, net: Net | None = None) -> tuple[HetFSDP, Net, Tensor]:
    """The model, the module inside it, and this rank's samples."""
    net = Net() if net is None else net
    model = HetFSDP(net, plan, units=[Layer], device_spec=DeviceSpec(host=HOSTS[rank]))
    first = plan.first_sample(model.position)
    batch = torch.linspace(-1, 1, plan.global_batch_size * WIDTH, dtype=torch.float64)
    samples = batch.view(-1, WIDTH)[first:]
    return model, net, samples[: plan.ranks[model.position].rank_batch_size]


def all_say(outcomes: Sequence[Outcome], exception_name: str, *parts: str) -> None:
    """Every rank ended in time with this exception and all ``parts`` in its message.

    A rank may hear it from one that found out first.
    """
    for outcome in outcomes:
        assert outcome.exception_name in (exception_name, "RuntimeError"), outcome.traceback
        if outcome.exception_name != exception_name:
            assert f"{exception_name}: " in outcome.message
        for part in parts:
            assert part in outcome.message
        assert outcome.is_within(WITHIN_S)
    assert any(outcome.exception_name == exception_name for outcome in outcomes)


def others_hear(outcomes: Sequence[Outcome], culprit: int, error: str, *parts: str) -> None:
    """The culprit ended with ``error`` itself, the others with who, where and what."""
    name, _, message = error.partition(": ")
    for outcome in outcomes:
        assert outcome.is_within(WITHIN_S)
        assert message in outcome.message
        if outcome.rank == culprit:
            assert outcome.exception_name == name, outcome.traceback
            heard = outcome.traceback  # where it happened is added as a note
        else:
            assert outcome.exception_name == "RuntimeError", outcome.traceback
            assert outcome.message.startswith(f"rank {culprit} (")
            assert name in outcome.message
            assert "Fix the cause on that rank" in outcome.message
            heard = outcome.message
        assert all(part in heard for part in parts), heard
        assert f"any device on {HOSTS[culprit]}" in heard


def refused_everywhere(error: str, *parts: str, world_size: Any = 3) -> Any:
    """A test of what one or all ranks do, of which ``all_say``."""

    def check(outcomes: Sequence[Outcome], *words: str) -> None:
        all_say(outcomes, error, *words)

    return ends_all_ranks(world_size, *parts, check=check)


def told_by_rank_one(error: str, *parts: str) -> Any:
    """A test of what rank 1 does, of which ``others_hear``; ``says`` is more of the error."""

    def check(outcomes: Sequence[Outcome], *words: str) -> None:
        others_hear(outcomes, 1, error + "".join(words), *parts)

    return ends_all_ranks(3, check=check)


# What does not fit together, found when the model is wrapped


@refused_everywhere(
    "ValueError",
    "The plan was made for another model",
    "layers.1: planned absent, found 20",
    "blocks.7: planned 9, found absent",
    "Give HetFSDP the model, units and loss_fn that it was made with, or run the planner",
)
def test_a_plan_for_another_model_names_the_units_that_differ(rank: int) -> None:
    planned = (PlannedUnit(fqn="layers.0", numel=20), PlannedUnit(fqn="blocks.7", numel=9))
    wrap(rank, Plan(ranks=PLAN.ranks, units=planned))


@on_ranks(1)
def test_a_pattern_of_recomputed_units_that_names_none_is_told(rank: int) -> None:
    plan = Plan.by_hand(
        microbatch_sizes=[1], state_shares=[1.0], recompute=[["layers.0", "blocks.*"]]
    )
    with pytest.warns(UserWarning, match=r"has \['blocks\.\*'\] but .* 3 units: layers\.0, "):
        wrap(rank, plan)


@pytest.mark.parametrize(
    "world_size, says",
    [
        (
            n,
            f"The plan is for 3 devices but {n} ranks were started.",
        )
        for n in (2, 1)
    ],
)
@refused_everywhere(
    "ValueError",
    "planned 2: any device",
    "rank 0: any device on alpha",
    "Start 3 ranks or make a plan for ",
    world_size=None,
)
def test_a_plan_for_more_devices_than_ranks_shows_both(
    rank: int, world_size: int, says: str
) -> None:
    wrap(rank)


def of_three(shares: Sequence[float], **others: Any) -> Plan:
    return Plan.by_hand(microbatch_sizes=[1, 1, 1], state_shares=shares, **others)


@refused_everywhere(
    "ValueError",
    "The devices found do not fit the plan.",
    "planned 2: NVIDIA H100",
    "rank 2: any device on gamma",
    "Run the planner on this cluster",
)
def test_devices_that_do_not_fit_the_plan_are_shown_beside_it(rank: int) -> None:
    devices = [DeviceSpec(host="alpha"), DeviceSpec(), DeviceSpec(kind="NVIDIA H100")]
    wrap(rank, of_three([0.2, 0.2, 0.6], devices=devices))


@refused_everywhere(
    "ValueError",
    "plan: not the same on all ranks. Ranks [1] have",
    "state_share",
    "Give every rank the same plan.",
)
def test_plans_that_differ_between_ranks_name_the_rank_and_the_difference(rank: int) -> None:
    wrap(rank, of_three([0.5, 0.3, 0.2] if rank == 1 else [0.5, 0.2, 0.3]))


SAME_MODEL = "Give every rank the same model."


@pytest.mark.parametrize(
    "difference, says",
    [
        *((each, SAME_MODEL) for each in ("layers", "shape", "dtype", "frozen")),
        ("values", "layers.1.linear.bias"),
        ("values", "initial values of the model: not the same on all ranks"),
    ],
)
@refused_everywhere("ValueError", "model: not the same on all ranks. Ranks [2] have")
def test_models_that_differ_between_ranks_name_the_rank(
    rank: int, difference: str, says: str
) -> None:
    net = Net(num_layers=4 if difference == "layers" and rank == 2 else 3)
    layer = net.layer(1)
    if rank == 2 and difference == "shape":
        layer.linear = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
    if rank == 2 and difference == "dtype":
        layer.float()
    if rank == 2 and difference == "frozen":
        layer.requires_grad_(requires_grad=False)
    if rank == 2 and difference == "values":
        nn.init.zeros_(layer.linear.bias)
    wrap(rank, PLAN, net)


@refused_everywhere("ValueError", "state shares [0.5, 0.3, 0.3] sum to 1.1", "must sum to 1")
def test_shares_that_do_not_sum_to_one_are_refused_everywhere(rank: int) -> None:
    wrap(rank, of_three([0.5, 0.3, 0.3]))


@refused_everywhere("ValueError", "plan.json: ranks[0]: unknown fields ['state_shard']")
def test_a_malformed_plan_file_is_refused_everywhere_by_name(rank: int, tmp_path: Path) -> None:
    path = tmp_path / f"{rank} plan.json"
    path.write_text(PLAN.to_json().replace("state_share", "state_shard"))
    wrap(rank, Plan.load(path))


@told_by_rank_one("ValueError: units: 'layers.9' is not a module", "wrapping the model")
def test_a_rank_that_cannot_wrap_its_model_tells_the_others(rank: int) -> None:
    units: list[Any] = ["layers.9"] if rank == 1 else [Layer]
    HetFSDP(Net(), PLAN, units=units, device_spec=DeviceSpec(host=HOSTS[rank]))


# Calls at the wrong moment or with the wrong batch


@refused_everywhere(
    "ValueError",
    "position 1 of the plan got 5 samples but the plan gives it 2",
    "Let shardhet.loader(dataset, model) deal the global batch",
)
def test_a_batch_larger_than_planned_is_refused_everywhere(rank: int) -> None:
    model, _, x = wrap(rank)
    model(torch.cat([x, x, x[:1]]) if rank == 1 else x)


@refused_everywhere("ValueError", "ranks differ in gradients enabled", "[True, False, True]")
def test_gradients_on_some_ranks_only_are_refused_everywhere(rank: int) -> None:
    model, _, x = wrap(rank)
    with torch.set_grad_enabled(rank != 1):
        model(x)


@refused_everywhere("ValueError", "number of finished steps", "[8.0, 8.0, 7.0]")
def test_steps_that_differ_between_ranks_are_refused_everywhere(rank: int) -> None:
    model, _, x = wrap(rank)
    model.step = 7 if rank == 2 else 8
    model(x)


def go_back_without_having_gone_forward(rank: int, who: Sequence[int]) -> None:
    model, _, x = wrap(rank)
    model.backward(*model(x))
    if rank in who:
        model.backward(torch.zeros(()), 1)
    model(x)


@refused_everywhere("RuntimeError", "model.backward: there was no model(...)", "Call the model")
def test_a_backward_without_a_forward_is_refused(rank: int) -> None:
    go_back_without_having_gone_forward(rank, [0, 1, 2])


@told_by_rank_one("RuntimeError: model.backward: there was no model(...)")
def test_a_backward_without_a_forward_on_one_rank_ends_all(rank: int) -> None:
    go_back_without_having_gone_forward(rank, [1])


@pytest.mark.parametrize("is_frozen", [True, False], ids=["frozen", "detached"])
@refused_everywhere("RuntimeError", "no rank's loss depends on a parameter", "not detached")
def test_a_loss_without_a_graph_is_refused(rank: int, is_frozen: bool) -> None:
    net = Net()
    net.requires_grad_(not is_frozen)
    model, _, x = wrap(rank, net=net)
    loss, number = model(x)
    model.backward(loss.detach(), number)


@pytest.mark.parametrize("who", [[0, 1, 2], [1]], ids=["all", "one"])
@refused_everywhere(
    "RuntimeError",
    "unit 'layers.0' was called outside of HetFSDP's forward. Call the HetFSDP model",
)
def test_calling_the_inner_module_is_refused(rank: int, who: list[int]) -> None:
    model, net, x = wrap(rank)
    if rank in who:
        net(torch.zeros(2, WIDTH, dtype=torch.float64))
    model(x)


@told_by_rank_one("RuntimeError: ", "instead of loss.backward()")
def test_loss_backward_is_refused_and_the_others_told(rank: int) -> None:
    model, _, x = wrap(rank)
    loss_sum, num_tokens = model(x)
    if rank == 1:
        loss_sum.backward()
    model.backward(loss_sum, num_tokens)


# The order of units


def change_the_order(rank: int, step: int, visits_of_rank_one: list[int]) -> None:
    model, net, x = wrap(rank)
    for _ in range(4):
        if model.step == step and rank == 1:
            net.visits = visits_of_rank_one
        model.backward(*model(x))


@pytest.mark.parametrize(
    "visits, says",
    [
        ([0, 2, 1], "at place 1 of forward: ['layers.1', 'layers.2', '(no samples)']"),
        ([0, 1], "at place 2 of forward: ['layers.2', '(end of forward)', '(no samples)']"),
        (
            [0, 1, 2, 2],
            "at place 3 of forward: ['(end of forward)', 'layers.2', '(no samples)']",
        ),
    ],
    ids=["swapped", "missing", "more"],
)
@refused_everywhere("RuntimeError", "ranks visit different units")
def test_ranks_that_visit_different_units_are_all_told_which(
    rank: int, visits: list[int], says: str
) -> None:
    change_the_order(rank, 0, visits)


@pytest.mark.parametrize(
    "visits, says",
    [
        ([0, 2, 1], "unit 'layers.2' was called at place 1 of forward, where 'layers.1' was"),
        ([0, 1], "forward ended before unit 'layers.2' was called"),
        ([0, 1, 2, 2], "unit 'layers.2' was called at place 3 of forward, where '(end of"),
    ],
    ids=["swapped", "missing", "more"],
)
@told_by_rank_one("RuntimeError: model(...): ")
def test_a_unit_called_out_of_order_later_ends_all(
    rank: int, visits: list[int], says: str
) -> None:
    change_the_order(rank, 2, visits)


# Losses that are no numbers


# Calls that others do not make or cannot


@ends_all_ranks(3, "clip_grad_norm_", within_s=3.0)
def test_ranks_in_different_calls_are_all_told(rank: int) -> None:
    model, _, x = wrap(rank)
    model.backward(*model(x))
    if rank == 1:
        model(x)
    else:
        model.clip_grad_norm_(1.0)


@told_by_rank_one("ValueError: does not fit the model: missing ['layers.1.linear.bias']")
def test_a_state_dict_that_does_not_fit_on_one_rank_is_told_everywhere(rank: int) -> None:
    model, _, x = wrap(rank)
    boxes = model.sharded_state_dict()
    whole = {fqn: torch.zeros(box.global_shape) for fqn, box in boxes.items()}
    if rank == 1:
        del whole["layers.1.linear.bias"]
    model.load_state_dict(whole)
    model(x)


@pytest.mark.parametrize("moment", ["unshard", "reshard"])
@told_by_rank_one("OutOfMemoryError: tried to allocate 7 bytes")
def test_a_rank_that_cannot_gather_while_the_model_is_probed_ends_all(
    rank: int, moment: str
) -> None:
    """The others wait for its rows then, and not for what it says."""
    model, _, x = wrap(rank)
    if rank == 1:
        unit = model._runtime.units[2]

        def fail() -> None:
            raise torch.OutOfMemoryError("tried to allocate 7 bytes")

        setattr(unit, moment, fail)
    model(x)
