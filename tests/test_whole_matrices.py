"""Matrices that one rank stores whole: optimizers that need them train as in one process."""

import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from shardhet import HetFSDP, Plan
from shardhet.fsdp.step.around import Activity, Observed
from tests import checkpoint_cases
from tests.checkpoint_cases import draw_pipeline, with_gradients
from tests.hosts import on_different_hosts
from tests.ordinary import WIDTH, Pair
from tests.selection import one_in
from tests.worlds import run_ranks, run_ranks_expecting_failure

BATCH = 6  # samples of a step
NUM_STEPS = 5
NUM_CASES = 40


class Soap(optim.Optimizer):
    """Adam in the eigenbasis of both sides' covariances, which lists hold."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, param in with_gradients(self):
            grad, state = param.grad, self.state[param]
            sides = [(0, 1), (1, 0)][: param.dim()] if param.dim() == 2 else []
            state["step"] = state.get("step", 0) + 1
            means = state.setdefault(  # of distinct eigenvalues, or any basis would do
                "means", [torch.linspace(1, 2, grad.shape[i]).to(grad).diag() for i, _ in sides]
            )
            square = state.setdefault("square", torch.zeros_like(grad))
            for mean, (_, j) in zip(means, sides, strict=True):
                mean.lerp_(torch.tensordot(grad, grad, dims=([j], [j])), 0.1)
            bases = [torch.linalg.eigh(mean)[1] for mean in means]
            turned = bases[0].T @ grad @ bases[1] if bases else grad
            square.lerp_(turned.square(), 0.1)
            turned = turned / (square.sqrt() + 1e-3)
            param -= group["lr"] * (bases[0] @ turned @ bases[1].T if bases else turned)


class Coupled(optim.Optimizer):
    """Divides by the norm over all its parameters."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        all_of_it = torch.nn.utils.get_total_norm([p.grad for _, p in with_gradients(self)])
        for group, param in with_gradients(self):
            param -= group["lr"] * param.grad / all_of_it


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """Of the blocks."""
    names = [fqn for fqn, _ in model.named_parameters()]
    shapes = {fqn for fqn in names if fqn.startswith("blocks.") and fqn.endswith(".weight")}
    return [param for fqn, param in model.named_parameters() if fqn in shapes]


def two_optimizers(model: nn.Module, kind: str) -> list[optim.Optimizer]:
    """That kind for the blocks' matrices, AdamW for the rest."""
    chosen = {id(param): param for param in matrices(model)}
    rest = [param for param in model.parameters() if id(param) not in chosen]
    # An eps that differences of rounding are small to.
    return [KINDS[kind]([*chosen.values()], lr=0.02), optim.AdamW(rest, lr=0.01, eps=1e-3)]


KINDS: dict[str, Callable[..., Any]] = {
    "muon": optim.Muon,
    "adafactor": optim.Adafactor,
    "soap": Soap,
}


def draw_plan(draw: random.Random, world_size: int = 0, *, has_stages: bool = False) -> Plan:
    """A plan of checkpoint_cases whose matrices are whole."""
    if has_stages:
        return draw_pipeline(draw, ("blocks.0", "blocks.1", "head"), whole_matrices=True)
    return checkpoint_cases.draw_plan(draw, world_size or None, whole_matrices=True)


class Wholes(Pair):
    """A pair with two optimizers each."""

    def __init__(self, plan: Plan, kind: str, **options: Any) -> None:
        super().__init__(plan, options)
        both = (self.model, self.plain)
        self.mine, self.theirs = (two_optimizers(each, kind) for each in both)

    def step_plain(self, step: int, clip_at: float | None = None) -> float:
        """One step of one process; its loss."""
        batch = batch_of(step)
        loss_sum, num = self.plain(**batch)
        (loss_sum / num).backward()
        end_step(self.plain, self.theirs, clip_at)
        return loss_sum.item() / num

    def step(self, step: int, clip_at: float | None = None) -> None:
        """One step of both, after which they are the same."""
        own = self.plan.sample_indices(self.model.position)
        batch = {name: each[own] for name, each in batch_of(step).items()}
        mean = self.model.forward_backward(**batch)
        end_step(self.model, self.mine, clip_at)
        expected = self.step_plain(step, clip_at)
        assert mean is not None
        assert abs(mean - expected) <= 1e-12 * abs(mean)
        self.same_params(1e-12)


def batch_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    return {"x": draw(BATCH, WIDTH), "y": draw(BATCH, 3)}


def end_step(
    model: nn.Module, optimizers: list[optim.Optimizer], clip_at: float | None
) -> None:
    if clip_at is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_at)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def train(
    rank: int, plan: Plan, kind: str, clip_at: float | None, is_independent: bool
) -> list[Tensor]:
    with on_different_hosts() if is_independent else nullcontext():
        pair = Wholes(plan, kind)
    for step in range(NUM_STEPS):
        pair.step(step, clip_at)
    for param in matrices(pair.model):
        assert bool(param.numel()) == bool(pair.mine[0].state.get(param))
    return [param.detach().clone() for param in pair.model.parameters()]


@pytest.mark.parametrize("seed", one_in(8, range(NUM_CASES)))
def test_parameters_are_those_of_one_process(seed: int) -> None:
    draw = random.Random(f"whole {seed}")
    plan = draw_plan(draw, has_stages=seed % 4 == 3)
    args = plan, draw.choice([*KINDS]), draw.choice([None, 0.05]), draw.random() < 0.5
    first, again = (run_ranks(train, plan.world_size, *args) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert all(map(torch.equal, one, other))


def count_bytes(rank: int) -> list[int]:
    """What this rank sends in a step, with matrices cut by rows and with whole ones."""
    found = []
    post = dist.batch_isend_irecv
    for whole in (False, True):
        plan = Plan.by_hand(
            microbatch_sizes=[1, 2, 1], state_shares=[0.5, 0.1, 0.4], whole_matrices=whole
        )
        sent: list[int] = []

        def count(ops: list[dist.P2POp], sent: list[int] = sent) -> list[dist.Work]:
            sent += [op.tensor.nbytes for op in ops if op.op is dist.isend]
            return post(ops)

        with on_different_hosts():
            model = HetFSDP(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), plan)
            x = torch.ones(plan.ranks[rank].rank_batch_size, 8)
            for patch in (nullcontext(), mock.patch.object(dist, "batch_isend_irecv", count)):
                with patch:
                    model.backward(model(x).sum(), len(x))
        owners = [box.rows for box in model.sharded_state_dict().values()]
        assert not whole or all(rows.numel in (0, 8) for rows in owners)
        found.append(sum(sent))
    return found


def test_as_many_bytes_are_sent_as_with_rows() -> None:
    of_rows, of_whole = (sum(each) for each in zip(*run_ranks(count_bytes, 3), strict=True))
    assert of_rows == of_whole > 0


def refuse(rank: int, plan: Plan, make: Callable[..., Any]) -> None:
    pair = Pair(plan)
    pair.backward()
    make(pair.model).step()


def muon_of_all(model: nn.Module) -> optim.Optimizer:
    return optim.Muon([param for param in model.parameters() if param.dim() == 2])


def coupled(model: nn.Module) -> optim.Optimizer:
    return Coupled(matrices(model))


def lbfgs(model: nn.Module) -> optim.Optimizer:
    return optim.LBFGS(matrices(model))


TWO = {"microbatch_sizes": [2, 1], "state_shares": [0.7, 0.3]}


@pytest.mark.parametrize(
    ("whole", "make", "message"),
    [
        (False, muon_of_all, "give it only parameters that are stored whole"),
        (["head"], muon_of_all, "weight is cut into rows, but a rank"),
        (True, coupled, "optimizer Coupled updates rows of a parameter differently"),
        (True, lbfgs, "optimizer LBFGS takes inner products over all parameters"),
    ],
)
def test_what_needs_more_than_its_parameters_is_refused(
    whole: bool | list[str], make: Callable[..., Any], message: str
) -> None:
    plan = Plan.by_hand(**TWO, whole_matrices=whole)
    for outcome in run_ranks_expecting_failure(refuse, 2, plan, make):
        assert message in outcome.message, outcome.traceback


def late(rank: int) -> None:
    """Two ranks as of two hosts, whose last reduction goes on after backward."""
    plan = Plan.by_hand(microbatch_sizes=[4, 2], state_shares=[0.7, 0.3], whole_matrices=True)
    with on_different_hosts():
        pair, other = Wholes(plan, "muon"), Pair(plan)
    happened = list[str]()

    def observe(each: Observed) -> None:
        if each.activity is Activity.WAIT_REDUCE:
            happened.append(each.unit)

    pair.model.add_observer(observe)
    for name, optimizer in zip(("muon", "adamw"), pair.mine, strict=True):
        optimizer.register_step_post_hook(lambda *_, name=name: happened.append(name))
    pair.step(0)
    assert happened == ["head", "blocks.1", "blocks.0", "muon", "", "adamw"]
    happened.clear()
    pair.step(1, clip_at=0.05)
    assert happened == ["head", "blocks.1", "blocks.0", "", "muon", "adamw"]
    # A gradient that is read is whole; what nobody reads is added to; what is dropped is gone.
    for _ in range(2):
        other.backward()
    with torch.no_grad():
        other.model(**other.mine(other.batch()))
    other.backward()
    other.same_grads()
    other.backward()
    bias = other.model.module.norm.bias
    bias.grad = None
    assert bias.grad is None
    other.backward()
    assert bias.grad is not None


def test_matrices_are_stepped_beside_the_last_reduction() -> None:
    run_ranks(late, 2)


class MuonOfParts(optim.Muon):
    """Takes matrices that are several in one by their parts, whose rows have proportions."""

    def _init_group(self, group: Any, *lists: list[Tensor]) -> bool:
        has_complex = super()._init_group(group, *lists)
        of = group.get("parts", (1,))
        for each in lists:
            sizes = [[len(whole) * n // sum(of) for n in of] for whole in each]
            each[:] = [
                part for whole, at in zip(each, sizes, strict=True) for part in whole.split(at)
            ]
        return has_complex


class Attending(nn.Module):
    """What attends, more or less, with fused or separate projections of which k and v are
    smaller.
    """

    def __init__(self, *, is_fused: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 2 * WIDTH, bias=False) if is_fused else None
        sizes = (WIDTH, WIDTH // 2, WIDTH // 2)
        parts = [nn.Linear(WIDTH, n, bias=False) for n in sizes if not is_fused]
        self.parts = nn.ModuleList(parts)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        whole = torch.cat([part(x) for part in self.parts], -1) if self.qkv is None else None
        q, kv = (whole if self.qkv is None else self.qkv(x)).chunk(2, -1)
        return x + self.out(q * kv.roll(1, -1).tanh())


def fused_and_apart(rank: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Attending(is_fused=False) for _ in range(2)))
    fused = nn.Sequential(*(Attending(is_fused=True) for _ in range(2)))

    def joined() -> dict[str, Tensor]:
        found = {}
        for i, block in enumerate(plain):
            found[f"{i}.qkv.weight"] = torch.cat([part.weight for part in block.parts])
            found[f"{i}.out.weight"] = block.out.weight
        return found

    fused.load_state_dict(joined())
    plan = Plan.by_hand(
        microbatch_sizes=[3, 2, 1], state_shares=[0.5, 0.3, 0.2], whole_matrices=True
    )
    model = HetFSDP(fused, plan)
    named = dict(model.named_parameters())
    mine = MuonOfParts(
        [
            {"params": [p for fqn, p in named.items() if "qkv" in fqn], "parts": (2, 1, 1)},
            {"params": [p for fqn, p in named.items() if "out" in fqn]},
        ]
    )
    theirs = optim.Muon(plain.parameters())
    for step in range(3):
        x = batch_of(step)["x"]
        own = x[plan.sample_indices(model.position)]
        model.backward(model(own).square().sum(), len(own))
        (plain(x).square().sum() / len(x)).backward()
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            whole = model.module.state_dict()
            for fqn, expected in joined().items():
                assert (whole[fqn] - expected).abs().max() < 1e-12


def test_fused_matrices_are_stepped_by_their_parts() -> None:
    run_ranks(fused_and_apart, 3)
