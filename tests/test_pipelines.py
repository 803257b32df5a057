"""Steps of pipelines: what leaks past a cut, what is refused, and ranks that fail."""

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardhet import HetFSDP, Plan, Stage, gather_features
from shardhet.fsdp.stages.calls import MetaPlaceholder
from shardhet.models.decoder import Decoder
from shardhet.training.dealing.batches import Share
from tests.beside import Beside, is_exact
from tests.misdeeds import Trap
from tests.parity import compare_grads
from tests.selection import one_in
from tests.small_models import small_decoder
from tests.worlds import on_ranks, run_ranks, run_ranks_expecting_failure

WORDS, SEQ_LEN, WIDTH = 16, 4, 6
CUTS = {
    1: [("*",)],
    2: [("embedding", "blocks.0"), ("blocks.[123]", "head")],
    3: [("embedding", "blocks.0"), ("blocks.1",), ("blocks.[23]", "head")],
}


def staged(
    sizes: Sequence[int], numbers: Sequence[int], num_rounds: int = 3, **changes: Any
) -> Plan:
    """A plan whose stages have so many ranks, with so many samples in a round each."""
    cuts = CUTS[len(numbers)]
    return Plan.by_hand(
        microbatch_sizes=sizes,
        num_rounds=num_rounds,
        stages=[Stage(units=u, num_ranks=n) for u, n in zip(cuts, numbers, strict=True)],
        **changes,
    )


def batch_of(num_samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_samples, SEQ_LEN)
    inputs = torch.randint(0, WORDS, shape, generator=generator)
    return inputs, torch.randint(-1, WORDS, shape, generator=generator)


def check_steps(module: nn.Module, plan: Plan, num_steps: int = 3, **options: Any) -> Beside:
    """Steps are those of one process, the second one with a sample less; returns both."""
    both = Beside(module, plan, **options)
    for step in range(num_steps):
        both.step(*batch_of(plan.global_batch_size - step % 2, step))
    return both


def _two_batches_a_step() -> Beside:
    torch.manual_seed(0)
    config = small_decoder(vocab_size=WORDS, width=8, num_layers=4, seq_len=SEQ_LEN)
    both = Beside(Decoder(config).double(), staged([2, 2], [1, 1], num_rounds=2))
    both.model.batches_per_step = 2
    return both


@on_ranks(2)
def test_the_first_batch_of_a_step_of_several_is_dropped(rank: int) -> None:
    both = _two_batches_a_step()
    model, batch = both.model, both.part(*batch_of(4))
    assert model.forward_backward(*batch) is None
    assert (model.rounds_left, model.is_between_steps) == (2, False)
    model.drop_rounds()
    assert (model.rounds_left, model.is_between_steps) == (4, True)


@on_ranks(2)
def test_a_step_of_several_batches_may_be_evaluated_in_between(rank: int) -> None:
    both = _two_batches_a_step()
    batches = [batch_of(4, seed) for seed in range(2)]
    for batch in batches:
        mean = both.model.forward_backward(*both.part(*batch))
        with torch.no_grad():
            both.model(*both.part(*batch))
    is_exact(mean, both.step_of_one(*(torch.cat(each) for each in zip(*batches, strict=True))))
    compare_grads(both.model, both.plain)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@on_ranks(2)
def test_stages_drop_out_and_round_as_without_them(
    rank: int, dtype: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    config = small_decoder(vocab_size=WORDS, width=8, num_layers=4, dropout=0.3)
    module, options = Decoder(config), {"param_dtype": dtype, "seed": 5}
    plan = staged(
        [2, 2], [1, 1], num_rounds=3, num_microbatches=[2, 2], recompute=[True, False]
    )
    flat = Plan.by_hand(microbatch_sizes=[2], num_microbatches=[2], num_rounds=3)
    alone = dist.new_group([rank], use_local_synchronization=True)
    models = [
        HetFSDP(copy.deepcopy(module), plan, **options),
        HetFSDP(copy.deepcopy(module), flat, group=alone, **options),
    ]
    for step in range(2):
        inputs, targets = batch_of(plan.global_batch_size, step)
        means = [model.forward_backward(inputs, targets) for model in models]
        assert means[0] == means[1]
        for mine, other in zip(*(model.parameters() for model in models), strict=True):
            assert mine.grad is not None
            assert other.grad is not None
            if mine.numel():
                assert torch.equal(mine.grad.as_subclass(Tensor), other.grad)


# What observers see


def _observed(rank: int, plan: Plan) -> list[tuple[str, str, int | None]]:
    torch.manual_seed(0)
    model = HetFSDP(Leaky(), plan, units=UNITS)
    inputs, targets = batch_of(plan.global_batch_size)
    mine = plan.sample_indices(model.position)
    model.forward_backward(inputs[mine], targets[mine])  # with a probe
    seen: list[tuple[str, str, int | None]] = []
    end = model.add_observer(lambda e: seen.append((e.unit, e.activity.value, e.microbatch)))
    model.forward_backward(inputs[mine], targets[mine])
    end()
    model.forward_backward(inputs[mine], targets[mine])
    return seen


def test_observers_see_what_a_rank_computes_and_its_waits_for_other_stages() -> None:
    plan = staged([1, 1, 2], [2, 1], num_rounds=3)
    for rank, seen in enumerate(run_ranks(_observed, 3, plan)):
        own = ["embedding", "blocks.0"] if rank < 2 else [f"blocks.{i}" for i in (1, 2, 3)]
        own += ["head"] if rank == 2 else []
        for phase in ("forward", "backward"):
            units = [unit for unit, activity, _ in seen if activity == phase]
            assert sorted(units) == sorted(own * 3)
        waits = [unit for unit, activity, _ in seen if activity == "wait_stage"]
        assert waits == [""] * 3  # for samples, or for their gradients


# Evaluation


def _logits(rank: int, plan: Plan) -> None:
    torch.manual_seed(0)
    module = Leaky("logits").double()
    model = HetFSDP(copy.deepcopy(module), plan, units=UNITS)
    more = 3 * plan.global_batch_size - 1  # some ranks have a round less
    for num_samples in (plan.global_batch_size, 4, more, 1, 0):
        inputs, targets = batch_of(num_samples, 1)
        share = Share.in_stages(plan, model.position, num_samples)
        mine = share.of(list(range(num_samples)))
        with torch.no_grad():
            logits, means = model(inputs[mine], targets[mine])
            if not num_samples:
                assert logits.dim() == means.dim() == 0  # as without stages
                continue
            expected = module(inputs, targets)
            of_all = gather_features(logits)
        shares = [Share.in_stages(plan, i, num_samples) for i in plan.groups[-1]]
        order = [i for share in shares for i in share.of(list(range(num_samples)))]
        torch.testing.assert_close(of_all, expected[0][order], rtol=1e-12, atol=1e-12)
        if model.position not in plan.groups[-1]:
            mine = []
        assert logits.shape == (len(mine), SEQ_LEN, WORDS)
        torch.testing.assert_close(logits, expected[0][mine], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(means, expected[1][mine], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "sizes, numbers", [([3], [1]), ([1, 1, 2], [2, 1]), ([2, 1, 1], [1, 2]), ([2] * 3, [1] * 3)]
)
def test_the_last_stage_has_the_output_of_all_rounds(
    sizes: list[int], numbers: list[int]
) -> None:
    run_ranks(_logits, len(sizes), staged(sizes, numbers, num_rounds=4))


# What leaks past a cut


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.spring: Callable[[str], None] = lambda place: None

    def forward(self, x: Tensor, first: Tensor | None = None, mask: Any = None) -> Tensor:
        self.spring("forward")
        if first is not None:
            x = x + first.square()
        y: Tensor = Trap.apply(x + self.linear(x).tanh(), lambda: self.spring("backward"))
        return y if mask is None else y * mask


class Leaky(nn.Module):
    """How later blocks depend on the embedding is ``way``."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.way, self.calls = way, 0
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.scale = nn.Parameter(torch.tensor([0.7]))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)
        self.norm = nn.BatchNorm1d(SEQ_LEN) if way == "batch norm" else None
        self.drop = nn.Dropout(0.0)

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | int]:
        way = self.way
        self.calls += way == "counts"
        first = x = self.embedding(inputs)
        if self.norm is not None:
            x = self.norm(x)
        if way == "dropout":
            first = x = self.drop(first)
        mask = (first.sum(-1, keepdim=True) > -1).to(x.dtype) if way == "mask" else None
        table = x.new_ones(WIDTH) * self.scale
        for i, block in enumerate(self.blocks):
            late = i == 3 and way in ("late", "swallows", "dropout")
            x = block(x * table, first if late else None, mask if i == 3 else None)
            if way == "read" and i == 3 and bool((first.detach() == first).all()):
                x = x + 1
            if way == "written" and i == 1:
                x = x.clone()
                x[:, 0] = first[:, 0]
            if way == "again" and i == 2:
                x = self.blocks[0](x)
        if way == "logits":
            return self.head(x), x.mean(dim=(1, 2))
        if way == "ends":
            return x.sum(), (targets >= 0).sum()
        if way == "mean":
            return self.head(x).square().mean(), 1
        loss = nn.functional.cross_entropy(
            self.head(x).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum"
        )
        return loss, (targets >= 0).sum()


UNITS = ("embedding", *(f"blocks.{i}" for i in range(4)), "head")


def _leaks(rank: int, way: str, plan: Plan) -> None:
    torch.manual_seed(0)
    model = check_steps(Leaky(way).double(), plan, units=UNITS).model
    kind = model._pipeline._kinds._kinds[0]  # type: ignore[attr-defined]
    if kind.sent:
        values = {way: 2} if way else {}
        assert len(kind.sent) == values.get(way, 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", ["", "late", "mask", "read", "written", "dropout"])
@pytest.mark.parametrize("numbers", [[2, 1], [1, 1, 1]])
def test_what_reaches_a_later_stage_is_handed_over(way: str, numbers: list[int]) -> None:
    sizes = [1, 1, 2] if len(numbers) == 2 else [2, 2, 2]
    run_ranks(_leaks, 3, way, staged(sizes, numbers))


def test_an_absent_tensor_has_a_shape_and_no_value() -> None:
    absent = MetaPlaceholder.like(torch.empty(2, 3, device="meta"), torch.device("cpu"))
    param = nn.Parameter(torch.ones(3))
    made = nn.functional.layer_norm(absent * param, (3,), param)[:, 1:]
    assert isinstance(made, MetaPlaceholder)
    assert made.shape == (2, 2)
    assert made.device.type == "cpu"
    ones = absent.new_ones(2) + torch.ones_like(absent)[:, 0]
    assert ones.tolist() == [2, 2]
    assert isinstance(torch.cat([absent, torch.ones(1, 3)]), MetaPlaceholder)
    for use in (
        lambda: absent.sum().item(),
        lambda: bool((absent > 0).all()),
        lambda: torch.zeros(2, 3).copy_(absent),
        lambda: torch.ones(2, 3)[absent > 0],
    ):
        with pytest.raises(RuntimeError, match=r"stages: .* not handed over"):
            use()


# What is refused


def _refused(rank: int, what: str, way: str, plan: Plan) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"units": UNITS}
    if what == "loss_fn":
        options["loss_fn"] = lambda output: output.loss
    if what == "float16":
        options["param_dtype"] = torch.float16
    module: nn.Module = Leaky(way)
    if what == "compiled":
        module.get_submodule(UNITS[1]).compile(backend="eager")
    if what == "replaced":
        drop = module.get_submodule("drop")
        drop.forward = drop.forward
    model = HetFSDP(module, plan, **options)
    inputs, targets = batch_of(plan.global_batch_size)
    mine = plan.sample_indices(model.position)
    given = (inputs[mine], targets[mine])
    if what == "model(...)":
        model(*given)
    if what == "too many samples":
        model.forward_backward(*(each.repeat(2, 1) for each in given))
    if what == "unit by unit":
        with model.unit_by_unit():
            model.forward_backward(*given)
    if what == "own_samples":
        model.own_samples  # noqa: B018
    if what == "gather_features":
        model.forward_backward(*given)
        gather_features(inputs)
    if what == "other samples" and rank == 2:
        given = (inputs[mine].flip(0), targets[mine].flip(0))
    if what == "fewer samples" and rank == 2:
        given = (inputs[mine][:-1], targets[mine][:-1])
    if what == "other lengths" and rank == 0:
        given = (inputs[mine][:, 1:], targets[mine][:, 1:])
    model.forward_backward(*given)
    if what == "dropout":
        model.module.drop.p = 0.5
        model.forward_backward(*given)
    if what == "flips":
        model.way = "again"
        model.forward_backward(*given)


TWO = staged([1, 1, 2], [2, 1])
LAST_IS_HEAD = Plan.by_hand(
    microbatch_sizes=[1, 1, 2],
    stages=[
        Stage(units=("embedding", "blocks.*"), num_ranks=2),
        Stage(units=("head",), num_ranks=1),
    ],
)
OTHER_NAMES = Plan.by_hand(
    microbatch_sizes=[1, 1, 2],
    stages=[
        Stage(units=("embedding", "block.1", "blocks.9", "blocks.0"), num_ranks=2),
        Stage(units=("blocks.[1-3]", "head", "drop"), num_ranks=1),
    ],
)
REFUSED = {
    "mean": ("mean", "forward_backward: the loss is what the model returns, which is no sum"),
    "float16": ("", "param_dtype is float16, but the loss is not scaled"),
    "batch norm": (
        "batch norm",
        "batch norm outside of units, which a plan with stages cannot have yet",
    ),
    "counts": ("counts", "attributes that change in every forward (calls of the model)"),
    "loss_fn": ("", "Stages have no model.backward: wrap a module"),
    "compiled": ("", "a module around a unit's forward that is compiled"),
    "replaced": ("", "a forward that was replaced outside of units"),
    "again": ("again", "unit 'blocks.0' of stage 0 is called after unit 'blocks.2' of stage 1"),
    "dropout": ("dropout", "dropout outside of units is used in stages [0, 1]"),
    "names": ("", "stages[0] names 'block.1', 'blocks.9', which the model does not have"),
    "idle": ("ends", "forward calls no unit of stage 1"),
    "model(...)": ("", "model.forward_backward"),
    "too many samples": ("", "forward_backward: this rank got"),
    "unit by unit": ("", "called inside unit_by_unit()"),
    "own_samples": ("", "own_samples: the plan has 2 stages"),
    "gather_features": ("", "gather_features: the plan has several rounds, or stages"),
    "other samples": ("", "the stages were passed other samples"),
    "fewer samples": ("", "the stages got"),
    "other lengths": ("", "Pad them alike"),
    "flips": ("", "is called after unit|was called at place"),
}


@pytest.mark.parametrize("what", one_in(5, REFUSED))
def test_what_stages_cannot_do_is_refused_on_every_rank(what: str) -> None:
    way, message = REFUSED[what]
    plan = {"idle": LAST_IS_HEAD, "names": OTHER_NAMES}.get(what, TWO)
    for outcome in run_ranks_expecting_failure(_refused, 3, what, way, plan):
        assert outcome.exception_name is not None
        assert any(part in outcome.message for part in message.split("|")), outcome.message


# Batch norm, whose statistics are those of a microbatch


class NormedBlock(nn.Module):
    """A linear layer and a batch norm over positions."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(SEQ_LEN, momentum=momentum)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


def _normed(rank: int, plan: Plan) -> None:
    """All microbatches have two samples, so one process computes them one after the other."""
    torch.manual_seed(0)
    module = Leaky().double()
    for i, momentum in ((0, 0.1), (1, None), (3, 0.3)):
        module.blocks[i] = NormedBlock(momentum).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that results depend on the plan
        both = Beside(module, plan, units=UNITS)
    for step in range(3):
        batch = batch_of(plan.global_batch_size, step)
        both.step(*batch, pieces=[2] * (plan.global_batch_size // 2))
        for (fqn, found), expected in zip(
            both.model.module.named_buffers(), module.buffers(), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14, msg=fqn)
    inputs, targets = both.part(*batch)
    with pytest.raises(ValueError, match="batch norm in training mode"), torch.no_grad():
        both.model(inputs, targets)


def test_batch_norm_in_stages_is_that_of_one_process_by_microbatches() -> None:
    plan = staged([2, 2, 2], [2, 1], rank_batch_sizes=[2, 4, 6], recompute=[True, False, True])
    run_ranks(_normed, 3, plan, fresh_world=True)


# What would be done in two stages, or with gradients that are divided later


class OddBlock(nn.Module):
    """A block that does something odd, for instance clip a gradient."""

    def __init__(self, oddity: str = "") -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.oddity, self.temperature = oddity, 1.0

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.linear(x))
        if self.oddity == "clips" and y.requires_grad:
            y.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        if self.oddity == "halves" and y.requires_grad:
            y.register_hook(lambda grad: 0.5 * grad)
        x = x + y
        if self.oddity == "returns a view":
            return x, x[:, :1]
        return (x, self.temperature) if self.oddity == "returns a number" else x


class CountingHead(nn.Linear):
    """Returns the number of its samples too."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), len(x)


class Odd(nn.Module):
    """Four blocks, between which something odd happens."""

    def __init__(self, oddity: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(OddBlock(oddity if i == 0 else "") for i in range(4))
        self.head = CountingHead() if oddity.startswith("counts") else nn.Linear(WIDTH, WORDS)
        self.oddity = oddity
        if oddity == "module hook":
            self.blocks[1].register_full_backward_hook(lambda module, given, got: None)
        if oddity == "writes to what is frozen":
            for each in (self.embedding, self.blocks[0]):
                each.requires_grad_(False)

    def forward(self, inputs: Tensor, targets: Tensor, *, flag: bool = False) -> Any:
        x, given = self.embedding(inputs), 1.0
        for i, block in enumerate(self.blocks):
            if self.oddity == "checkpoint" and i == 0:
                x = checkpoint(
                    lambda y: self.blocks[1](self.blocks[0](y)), x, use_reentrant=True
                )
                continue
            if self.oddity == "checkpoint" and i == 1:
                continue
            x = block(x)
            if isinstance(x, tuple):
                x, given = x
            if i == 0 and self.oddity == "returns a view":
                given.zero_()  # type: ignore[attr-defined]
            elif i == 0 and self.oddity.startswith("writes"):
                x += 0.5
            elif i == 0 and self.oddity == "hook between" and x.requires_grad:
                x.register_hook(lambda grad: 0.5 * grad)
        x = 2 * x if flag else x
        if isinstance(given, float):
            x = x * given
        logits = self.head(x)
        if isinstance(logits, tuple):
            logits, _ = logits
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum"
        )
        return losses, (targets >= 0).sum()


ODDITIES: dict[str, tuple[str, ...]] = {
    # By what is done: what a plan of stages says, and one of rounds, whose ranks may have
    # arguments of their own.
    "clips": ("do not grow as the gradient", "do not grow as the gradient"),
    "halves": ("", ""),
    "returns a view": ("or a view of one or of another", "or a view of one or of another"),
    "returns a number": ("returns the value 0.5", ""),
    "counts in the last unit": ("", ""),
    "module hook": ("a backward hook of module 'blocks.1'", ""),
    "writes": ("writes to what unit 'blocks.0' has returned", ""),
    "writes to what is frozen": ("writes to what unit 'blocks.0' has returned", ""),
    "hook between": ("or gives it a hook", ""),
    "checkpoint": ("is called by gradient checkpointing", "during backward"),
    "flag": ("were passed other samples or other values",),
}


def _odd(rank: int, oddity: str, plan: Plan) -> None:
    torch.manual_seed(0)
    both = Beside(Odd(oddity).double(), plan)
    for step in range(2):
        for each in (both.plain, both.model.module):
            each.blocks[0].temperature = 1 / (1 + step)  # type: ignore[index,union-attr]
        both.step(*batch_of(plan.global_batch_size, step), flag=oddity == "flag" and rank == 0)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("oddity", "has_stages"),
    [
        pytest.param(oddity, i == 0, id=f"{oddity}-{('stages', 'rounds')[i]}")
        for oddity, messages in ODDITIES.items()
        for i in range(len(messages))
    ],
)
def test_what_is_odd_is_as_in_one_process_or_refused(oddity: str, has_stages: bool) -> None:
    message = ODDITIES[oddity][not has_stages]
    plan = staged([2, 2], [1, 1]) if has_stages else Plan.even(2, microbatch_size=2)
    plan = plan if has_stages else replace(plan, num_rounds=2)
    if not message:
        run_ranks(_odd, 2, oddity, plan)
        return
    for outcome in run_ranks_expecting_failure(_odd, 2, oddity, plan):
        assert message in outcome.message, outcome.message


# What may not change


ORDER = [0, 1, 2, 3]  # of the blocks; nothing that a probe sees


class InAnyOrder(Odd):
    """Its blocks are called in an order that may change."""

    def __init__(self) -> None:
        super().__init__("")

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        x = self.embedding(inputs)
        for i in ORDER:
            x = self.blocks[i](x)
        return self.head(x).square().sum() + 0.0 * targets.sum(), len(x)


def _calls_others_in_another_order(rank: int, plan: Plan) -> None:
    torch.manual_seed(0)
    model = HetFSDP(InAnyOrder().double(), plan)
    for step in range(2):
        inputs, targets = batch_of(plan.global_batch_size, step)
        mine = plan.sample_indices(model.position)
        if rank == 2 and step:  # blocks of the stages before it, which it only stands in for
            ORDER[:2] = [1, 0]
        model.forward_backward(inputs[mine], targets[mine])


def test_units_of_other_stages_have_the_order_of_the_first_step() -> None:
    plan = staged([2, 2, 2], [1, 1, 1])
    for outcome in run_ranks_expecting_failure(_calls_others_in_another_order, 3, plan):
        words = "unit 'blocks.1' was called at place 1 of forward, where 'blocks.0' was"
        assert words in outcome.message
