"""What the tests of checkpoints share: a model with odd parameters, and plans drawn by seed."""

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from shardhet import HetFSDP, Plan, Stage, redistribute
from shardhet.checkpoint import load, save
from tests.worlds import run_ranks

BATCH = 6  # samples of a global batch, under every plan
WORDS, WIDTH, TOKENS = 11, 5, 3
BAR = 1e-9  # of losses, relative: other plans add in another order
FORMS: list[dict[str, bool]] = [
    {
        "reshard_after_forward": forward,
        "reshard_after_backward": backward,
        "reduce_each_round": each,
    }
    for forward, backward in ((True, True), (False, True), (False, False))
    for each in (True, False)
]


class OddBlock(nn.Module):
    """Rows that no number of ranks divides, and perhaps a scalar."""

    def __init__(self, *, has_scalar: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.outer = nn.Linear(2 * WIDTH + 1, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.9)) if has_scalar else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.outer(self.inner(x).tanh())
        return x + (y if self.scale is None else self.scale * y)


class Odd(nn.Module):
    """Tied, frozen and unused parameters, buffers, and blocks."""

    def __init__(
        self, *, has_scalar: bool = True, is_tied: bool = True, has_unused: bool = True
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(OddBlock(has_scalar=has_scalar) for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(3, 2)) if has_unused else None
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("offset", torch.linspace(0, 0.1, WIDTH))
        self.register_buffer("num_words", torch.tensor(WORDS))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        x = self.embedding(tokens) + self.offset
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.frozen(x))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return loss, targets.numel()


def with_gradients(optimizer: optim.Optimizer) -> Iterator[tuple[dict[str, Any], Any]]:
    """Each parameter that has a gradient, with its group."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                yield group, param


class Lion(optim.Optimizer):
    """Element by element, with a number of Python's among its states."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "sign": (0.9, 1)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, param in with_gradients(self):
            state = self.state[param]
            mean = state.setdefault("mean", torch.zeros_like(param))
            state["count"] = state.get("count", 0) + 1
            mean.lerp_(param.grad, 0.1 / state["count"])
            param -= group["lr"] * mean.sign()


OPTIMIZERS: dict[str, Any] = {
    "adamw": optim.AdamW,
    "adam": lambda groups: optim.Adam(groups, lr=0.01, amsgrad=True),
    "sgd": lambda groups: optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "plain sgd": lambda groups: optim.SGD(groups, lr=0.05),
    "adagrad": lambda groups: optim.Adagrad(groups, lr=0.05),
    "rmsprop": lambda groups: optim.RMSprop(groups, momentum=0.5, centered=True),
    "nadam": optim.NAdam,
    "lion": Lion,
}


def make_optimizer(model: nn.Module, kind: str) -> optim.Optimizer:
    """Two groups with different options; frozen parameters are in none."""
    params = [param for param in model.parameters() if param.requires_grad]
    matrices = [param for param in params if param.dim() > 1]
    others = [param for param in params if param.dim() <= 1]
    optimizer: optim.Optimizer = OPTIMIZERS[kind](
        [{"params": matrices}, {"params": others, "lr": 0.02}]
    )
    return optimizer


class Together:
    """Several optimizers that step together."""

    def __init__(self, *each: optim.Optimizer) -> None:
        self.each = list(each)

    def step(self) -> None:
        for each in self.each:
            each.step()

    def zero_grad(self) -> None:
        for each in self.each:
            each.zero_grad()


End = Plan | int | None  # a number: ranks of FSDP2; None: a plain module
CALLED = ("embedding", "blocks.0", "blocks.1", "frozen", "head")
UNITS = (CALLED, CALLED[:3], CALLED[1:3])  # of stages; the root has the others


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and where it trains, one end after the other."""

    seed: int = 0
    optimizer: str = "adamw"
    has_scalar: bool = True  # a 0-d parameter; FSDP2 takes none
    has_unused: bool = (
        True  # a parameter without gradients; FSDP2's checkpoints want all states
    )
    is_tied: bool = True
    ends: tuple[End, ...] = ()
    steps: tuple[int, ...] = ()  # at each end

    def module(self, *, empty: bool = False) -> Odd:
        torch.manual_seed(self.seed)
        module = Odd(
            has_scalar=self.has_scalar, is_tied=self.is_tied, has_unused=self.has_unused
        ).double()
        if empty:
            with torch.no_grad():
                for each in (*module.parameters(), *module.buffers()):
                    each.zero_()
        return module


def case_of(
    rng: random.Random, seed: int, ends: tuple[End, ...], steps: tuple[int, ...]
) -> Case:
    has_fsdp2 = any(isinstance(end, int) for end in ends)
    # FSDP2 wants a state of every parameter, which plain SGD has not.
    kinds = ["adamw", "sgd", "adam"] if has_fsdp2 else list(OPTIMIZERS)
    return Case(
        seed=seed,
        optimizer=kinds[(seed + seed // len(kinds)) % len(kinds)],
        has_scalar=not has_fsdp2 and rng.random() < 0.7,
        has_unused=not has_fsdp2,
        is_tied=rng.random() < 0.5,
        ends=ends,
        steps=(max(steps[0], has_fsdp2), *steps[1:]),
    )


def draw_case(seed: int) -> Case:
    """From one end to another; in a third of all cases one is plain or FSDP2, by turns."""
    rng = random.Random(f"checkpoint {seed}")
    ends: list[End] = [draw_plan(rng), draw_plan(rng)]
    if seed % 3 == 2:
        ends[rng.randrange(2)] = rng.randint(1, 4) if seed % 2 == 0 else None
    return case_of(rng, seed, tuple(ends), (rng.randint(0, 3), 3))


def draw_stages(seed: int) -> Case:
    """A pipeline, another end and the pipeline again, or the other way round."""
    rng = random.Random(f"checkpoint of stages {seed}")
    first = draw_pipeline(rng)
    others: list[Callable[[], End]] = [
        lambda: draw_plan(rng),
        lambda: draw_pipeline(rng),
        lambda: rng.randint(1, 3),
        lambda: None,
    ]
    other = others[seed % 4]()
    ends = (first, other, first) if seed // 4 % 2 == 0 else (other, first, other)
    return case_of(rng, seed, ends, (2, 2, 2))


def kind_of(end: End) -> str:
    if isinstance(end, Plan):
        return "flat" if end.stages is None else "pipeline"
    return "plain" if end is None else "fsdp2"


def draw_plan(
    rng: random.Random,
    world_size: int | None = None,
    *,
    has_rounds: bool = True,
    **changes: Any,
) -> Plan:
    """A plan for one to four ranks, some of which store nothing or compute nothing; in up to
    three rounds, of which the last may have fewer samples.
    """
    world_size = world_size or rng.randint(1, 4)
    places = [rng.randrange(world_size) for _ in range(BATCH)]  # of samples
    weights = [rng.choice([0, 0, 1, 2, 7]) for _ in range(world_size)]
    if not any(weights):
        weights[rng.randrange(world_size)] = 1
    microbatch_sizes = [rng.randint(1, 3) for _ in range(world_size)]
    recompute = rng.random() < 0.3
    num_rounds, round_size = rng.choice([(1, BATCH), (1, BATCH), (2, 3), (2, 4), (3, 2)])
    if not has_rounds:
        num_rounds, round_size = 1, BATCH
    on_host = random.Random(f"hosts {places} {weights}")  # all else is drawn as without it
    return Plan.by_hand(
        microbatch_sizes=microbatch_sizes,
        rank_batch_sizes=[places[:round_size].count(i) for i in range(world_size)],
        state_shares=[weight / sum(weights) for weight in weights],
        recompute=recompute,
        optimizer_on_host=[on_host.random() < 0.2 for _ in weights],
        num_rounds=num_rounds,
        global_batch_size=BATCH,
        **rng.choice(FORMS),
        **changes,
    )


def draw_pipeline(
    rng: random.Random, units: tuple[str, ...] | None = None, **changes: Any
) -> Plan:
    """Two stages or three of one to four ranks, perhaps with much on the hosts."""
    units = units or rng.choice(UNITS)
    number = rng.randint(2, min(3, len(units)))
    cuts = [0, *sorted(rng.sample(range(1, len(units)), number - 1)), len(units)]
    ranks = [1 + (rng.random() < 0.3) for _ in range(number)]
    num_rounds, round_size = rng.choice([(1, BATCH), (2, 3), (3, 2), (2, 4)])
    batches: list[int] = []
    shares: list[float] = []
    for n in ranks:
        first = rng.randint(0, round_size) if n == 2 else round_size
        batches += [first, round_size - first][:n]
        part = rng.choice([0.0, 0.2, 0.7]) if n == 2 else 1.0
        shares += [part, 1 - part][:n]
    recompute = rng.random() < 0.5
    return Plan.by_hand(
        microbatch_sizes=[rng.randint(1, 3) for _ in batches],
        rank_batch_sizes=batches,
        state_shares=shares,
        recompute=recompute,
        inputs_on_host=recompute and rng.random() < 0.5,
        optimizer_on_host=[rng.random() < 0.3 for _ in batches],
        num_rounds=num_rounds,
        global_batch_size=BATCH,
        stages=[
            Stage(units=units[a:b], num_ranks=n)
            for (a, b), n in zip(pairwise(cuts), ranks, strict=True)
        ],
        **rng.choice(FORMS),
        **changes,
    )


def batch_of(step: int) -> dict[str, Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    words = torch.randint(WORDS, (2, BATCH, TOKENS), generator=generator)
    return {"tokens": words[0], "targets": words[1]}


def wrap(module: nn.Module, plan: Plan, **options: Any) -> HetFSDP:
    return HetFSDP(module, plan, units=[OddBlock], **options)


def train(model: nn.Module, optimizer: Any, steps: Iterable[int]) -> list[float]:
    """The mean loss of every step, of a HetFSDP or of a plain module."""
    losses = []
    for step in steps:
        batch = batch_of(step)
        if isinstance(model, HetFSDP):
            own = model.plan.sample_indices(model.position)
            mean = model.forward_backward(**{name: each[own] for name, each in batch.items()})
            assert mean is not None
            losses.append(mean)
        else:
            loss_sum, num_tokens = model(**batch)
            (loss_sum / num_tokens).backward()
            losses.append(loss_sum.item() / num_tokens)
        optimizer.step()
        optimizer.zero_grad()
    return losses


State = dict[str, Any]  # whole tensors and numbers, by names of our own


@dataclass(frozen=True)
class Rows:
    """Some rows of a tensor."""

    start: int
    values: Tensor  # [rows, ...]; a scalar is one row


def whole_state(model: nn.Module, optimizer: optim.Optimizer) -> State:
    """All there is, put together from the rows of all ranks; without the code under test."""
    mine = _local_state(model, optimizer)
    everyones = model.exchange_objects(mine) if isinstance(model, HetFSDP) else [mine]
    whole: State = {}
    for name in dict.fromkeys(name for each in everyones for name in each):
        found = [each[name] for each in everyones if name in each]
        if isinstance(found[0], Rows):
            found.sort(key=lambda rows: rows.start)
            whole[name] = torch.cat([rows.values for rows in found])
        else:
            assert all(_same(each, found[0]) for each in found), name
            whole[name] = found[0]
    return whole


def _local_state(model: nn.Module, optimizer: optim.Optimizer) -> State:
    state: State = {}
    boxes = model.sharded_state_dict() if isinstance(model, HetFSDP) else None
    names = {param: fqn for fqn, param in model.named_parameters()}
    for param, fqn in names.items():
        start = 0 if boxes is None else boxes[fqn].rows.start

        def rows(tensor: Tensor, start: int = start) -> Rows:
            values = tensor.detach().clone()
            return Rows(start, values.view(1) if values.dim() == 0 else values)

        state[fqn] = rows(param)
        for name, value in optimizer.state.get(param, {}).items():
            is_scalar = name in ("step", "mu_product") or not isinstance(value, Tensor)
            # Of ranks without rows, as of other stages, nobody asks for numbers.
            if value is not None and not (is_scalar and not param.numel()):
                state[f"{fqn}/{name}"] = copy.deepcopy(value) if is_scalar else rows(value)
    inner = model.module if isinstance(model, HetFSDP) else model
    state |= {fqn: buffer.clone() for fqn, buffer in inner.named_buffers()}
    return state | groups_of(optimizer, names)


def groups_of(optimizer: optim.Optimizer, names: dict[nn.Parameter, str]) -> State:
    """The options of every group, and the names of its parameters."""
    return {
        f"group {number}/{name}": [names[p] for p in value] if name == "params" else value
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
    }


def check_same(found: State, expected: State) -> None:
    """Bit by bit."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, value in expected.items():
        assert _same(found[name], value), f"{name}: {found[name]} for {value}"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


# From end to end


def sharded_by_fsdp2(module: nn.Module, world_size: int) -> nn.Module:
    fully_shard(module, mesh=init_device_mesh("cpu", (world_size,)))
    return module


def whole_of_fsdp2(module: nn.Module, optimizer: optim.Optimizer) -> State:
    """Under the names of ``whole_state``."""
    state: State = {}
    names = {param: fqn for fqn, param in module.named_parameters()}
    for param, fqn in names.items():
        state[fqn] = param.full_tensor().detach().clone()
        for name, value in optimizer.state.get(param, {}).items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            state[f"{fqn}/{name}"] = whole.clone()
    state |= {fqn: buffer.clone() for fqn, buffer in module.named_buffers()}
    return state | groups_of(optimizer, names)


def world_size_of(end: End) -> int:
    return 1 if end is None else end if isinstance(end, int) else end.world_size


def units_of(*ends: End) -> list[str]:
    """Those of stages, if any of the plans has some."""
    staged = [end.stages for end in ends if isinstance(end, Plan) and end.stages is not None]
    return (
        [fqn for stage in staged[0] for fqn in stage.units]
        if staged
        else ["blocks.0", "blocks.1"]
    )


def placed(module: nn.Module, end: End, units: Any = None) -> nn.Module:
    if isinstance(end, int):
        return sharded_by_fsdp2(module, dist.get_world_size())
    return module if end is None else HetFSDP(module, end, units=units or units_of(end))


def go_on(
    rank: int, case: Case, number: int, folder: Path
) -> tuple[State | None, State | None, list[float]]:
    """What one end has loaded of the one before, what it saves, and its losses."""
    end, before = case.ends[number], case.ends[:number]
    model = placed(case.module(empty=number > 0), end)
    optimizer = make_optimizer(model, case.optimizer)
    state_of = whole_of_fsdp2 if isinstance(end, int) else whole_state
    first, loaded = sum(case.steps[:number]), None
    source, target = folder / str(number - 1), folder / str(number)
    if number and isinstance(end, int):
        states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=source)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optim"],
        )
    elif number:
        for group in optimizer.param_groups:
            group["lr"] = 100.0
        extra = load(model, optimizer, source)
        assert extra == (None if isinstance(before[-1], int) else {"seed": case.seed})
        if isinstance(model, HetFSDP) and all(isinstance(each, Plan) for each in before):
            assert model.step == first
    if number:
        loaded = state_of(model, optimizer)
    losses = train(model, optimizer, range(first, first + case.steps[number]))
    if isinstance(end, int):
        states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        dcp.save(states, checkpoint_id=target)
    else:
        save(model, optimizer, target, extra={"seed": case.seed})
    saved = state_of(model, optimizer)
    return (None, None, losses) if rank else (loaded, saved, losses)


def check_ends(case: Case, folder: Path) -> None:
    """Each end loads what the one before saved, and together they train as one process."""
    before, losses = None, list[float]()
    for number, end in enumerate(case.ends):
        [(loaded, saved, own), *_] = run_ranks(go_on, world_size_of(end), case, number, folder)
        assert number == 0 or loaded is not None
        check_same(loaded or {}, before or {})
        before = saved
        losses += own
    alone = replace(case, ends=(None,), steps=(sum(case.steps),))
    assert losses == pytest.approx(go_on(0, alone, 0, folder / "alone")[2], rel=BAR, abs=0)


def compare_moved(rank: int, case: Case, folder: Path) -> None:
    """One job moves from plan to plan, the other saves and loads."""
    units, has_stages = units_of(*case.ends), any(kind_of(e) == "pipeline" for e in case.ends)
    moved = placed(case.module(), case.ends[0], units)
    optimizer = make_optimizer(moved, case.optimizer)
    train(moved, optimizer, range(case.steps[0]))
    seen: list[str] = []
    moved.add_observer(lambda each: seen.append(each.unit))
    params = list(moved.parameters())
    for number, plan in enumerate(case.ends[1:], 1):
        save(moved, optimizer, folder / str(number))
        redistribute(moved, optimizer, plan)
        assert [id(p) for p in moved.parameters()] == [id(p) for p in params]
        resumed = placed(case.module(empty=True), plan, units)
        resumed_optimizer = make_optimizer(resumed, case.optimizer)
        load(resumed, resumed_optimizer, folder / str(number))
        assert moved.plan == resumed.plan
        assert moved.step == resumed.step
        for mine, theirs in zip(moved.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(mine, theirs)  # this rank's rows, too
        check_same(whole_state(moved, optimizer), whole_state(resumed, resumed_optimizer))
        first = sum(case.steps[:number])
        steps = range(first, first + case.steps[number])
        seen.clear()
        losses = train(moved, optimizer, steps)
        assert seen or not has_stages
        assert losses == train(resumed, resumed_optimizer, steps)  # bit by bit
        check_same(whole_state(moved, optimizer), whole_state(resumed, resumed_optimizer))
