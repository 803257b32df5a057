"""A campaign over traits at the border of what a split batch can do: exact, or refused.

    python -m experiments.fuzz.traits                    # 560 cases, and traits.csv
    python -m experiments.fuzz.traits --seeds 0 40       # some; writes nothing

The reference is the plain model on the whole global batch in one call.
"""

import argparse
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.common.results import console, markdown_table, write_csv
from shardhet import DeviceSpec, HetFSDP, Plan
from tests.fuzzing.campaign import Court
from tests.fuzzing.judge import Report, _group_of, _origin
from tests.parity import LOSS_BAR, PARAM_BAR, compare_params
from tests.patchwork import draw_plan

HERE = Path(__file__).parent
NUM_CASES = 560
VERDICTS = ("exact", "refused", "wrong", "crash", "hang", "invalid")
WIDTH, WORDS, LENGTH = 6, 11, 4
FORMS = {
    "attribute": ("root", "unit"),
    "mixed": ("root", "unit"),
    "packed": ("batch of one", "restarts"),
    "hidden": ("returned", "detached"),
    "empty": ("plain", "reshape", "loss_fn"),
    "branch": ("keyword", "attribute"),
    "tied": ("matmul", "linear"),
    "counter": ("logged", "scales"),
}


@dataclass(frozen=True, kw_only=True)
class TraitCase:
    """One model, plan and course of steps."""

    seed: int
    trait: str
    form: str
    plan: Plan
    sizes: tuple[tuple[int, ...], ...]  # samples of every position in each step
    kinds: tuple[str, ...] | None  # of the ranks, where their order matters
    recalls: bool  # a rank without samples passes rows of length 0, or calls with nothing

    @property
    def world_size(self) -> int:
        return self.plan.world_size


def draw_case(seed: int) -> TraitCase:
    """The case of that seed; traits take turns."""
    draw = random.Random(f"traits {seed}")
    trait = list(FORMS)[seed % len(FORMS)]
    plan, kinds = draw_plan(draw, draw.choice([1, 2, 2, 3]))
    full = tuple(rank.rank_batch_size for rank in plan.ranks)
    steps = []
    for _ in range(3):
        sizes = tuple(draw.choice([0, n, n]) for n in full) if trait == "empty" else full
        steps.append(sizes if any(sizes) else full)
    form = draw.choice(FORMS[trait])
    recalls = trait == "empty" or draw.random() < 0.5
    return TraitCase(
        seed=seed,
        trait=trait,
        form=form,
        plan=plan,
        kinds=kinds,
        sizes=tuple(steps),
        recalls=recalls,
    )


class Block(nn.Module):
    """Attention with a mask that may depend on the batch, and what its trait adds."""

    def __init__(self, trait: str, form: str) -> None:
        super().__init__()
        self.trait, self.form, self.count = trait, form, 0
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor, scale: float = 1.0) -> Tensor:
        self.count += self.trait == "counter"
        q, k, v = self.qkv(self.norm(x_BTD)).chunk(3, -1)
        mask = torch.ones(LENGTH, LENGTH).tril().bool()
        if self.trait == "packed" and (self.form == "restarts" or len(x_BTD) == 1):
            document_BT = (positions_BT == 0).cumsum(1)
            mask = mask & (document_BT[:, None] == document_BT[:, :, None])
        scores = (q @ k.transpose(1, 2)).masked_fill(~mask, float("-inf"))
        y_BTD = scale * (scores.softmax(-1) @ v)
        if (self.trait, self.form) == ("mixed", "unit"):
            y_BTD = y_BTD + (x_BTD[:, 0] @ x_BTD[:, 0].T).softmax(-1).diagonal()[:, None, None]
        if (self.trait, self.form) == ("counter", "scales"):
            y_BTD = y_BTD * (1 + 0.1 * self.count)
        return x_BTD + y_BTD


class TraitModel(nn.Module):
    """Embedding, two blocks, a branch and a head."""

    def __init__(self, trait: str, form: str) -> None:
        super().__init__()
        self.trait, self.form = trait, form
        self.scale, self.takes_branch = 1.0, True
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(trait, form) for _ in range(2))
        self.branch = Block("", "")
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if (trait, form) == ("tied", "linear"):
            self.head.weight = self.embedding.weight

    def forward(
        self, tokens_BT: Tensor, *, positions_BT: Tensor, takes_branch: bool = True
    ) -> Any:
        x_BTD = self.embedding(tokens_BT)
        hidden = []
        for block in self.blocks:
            scale = self.scale if (self.trait, self.form) == ("attribute", "unit") else 1.0
            x_BTD = block(x_BTD, positions_BT, scale)
            hidden.append(x_BTD)
        if self.takes_branch and takes_branch:
            x_BTD = self.branch(x_BTD, positions_BT)
        if (self.trait, self.form) == ("attribute", "root"):
            x_BTD = x_BTD * self.scale
        if (self.trait, self.form) == ("empty", "reshape"):
            x_BTD = x_BTD.reshape(len(tokens_BT), -1).view(-1, LENGTH, WIDTH)
        if (self.trait, self.form) == ("mixed", "root"):
            z_BD = F.normalize(x_BTD.mean(1), dim=-1)
            return 5 * z_BD @ z_BD.T
        if (self.trait, self.form) == ("tied", "matmul"):
            return x_BTD @ self.embedding.weight.T
        logits_BTV = self.head(x_BTD)
        return (logits_BTV, hidden) if self.trait == "hidden" else logits_BTV


def summed(logits_BTV: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy, and how many targets there are."""
    loss_sum = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")
    return loss_sum, torch.tensor(float(targets_BT.numel()))


def loss_of(case: TraitCase, output: Any, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The loss as a user's loop writes it."""
    if case.trait == "mixed" and case.form != "unit":
        labels = torch.arange(len(output))  # the pairs of the rank
        loss_sum = F.cross_entropy(output, labels, reduction="sum")
        return loss_sum, torch.tensor(float(len(labels)))
    if case.trait != "hidden":
        return summed(output, targets_BT)
    logits_BTV, hidden = output
    if case.form == "detached":
        hidden = [each.detach() for each in hidden]
    loss_sum, count = summed(logits_BTV, targets_BT)
    return loss_sum + sum(each.square().sum() for each in hidden), count


def run_on_rank(rank: int, case: TraitCase, generation: int) -> Report:
    """Train beside the reference; differences and errors are told and not raised."""
    report = Report()
    try:
        torch.manual_seed(case.seed)
        plain = TraitModel(case.trait, case.form).double()
        torch.manual_seed(case.seed)
        inner = TraitModel(case.trait, case.form).double()
        report.phase = "wrapping"
        options: dict[str, Any] = {"loss_fn": summed} if case.form == "loss_fn" else {}
        if case.kinds:
            options["device_spec"] = DeviceSpec(kind=case.kinds[rank])
        model = HetFSDP(inner, case.plan, group=_group_of(generation), **options)
        with model._peers.guard("the case"):
            _course(case, plain, model, report)
    except Exception as error:
        report.error = f"{type(error).__name__}: {error}"
        report.is_own, report.where = _origin(error)
    return report


def _course(case: TraitCase, plain: TraitModel, model: HetFSDP, report: Report) -> None:
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for index, sizes in enumerate(case.sizes):
        torch.manual_seed(case.seed + index)
        tokens, targets = torch.randint(WORDS, (2, sum(sizes), LENGTH))
        positions = torch.tensor([0, 1, 0, 1]).repeat(sum(sizes), 1)
        options: dict[str, Any] = {}
        if case.trait == "branch" and case.form == "keyword":
            options["takes_branch"] = index % 2 == 0
        for each in (plain, model):
            if case.trait == "attribute":
                each.scale = 1.0 + index  # type: ignore[assignment]
            if case.trait == "branch" and case.form == "attribute":
                each.takes_branch = index % 2 == 0  # type: ignore[assignment]
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss, count = loss_of(case, plain(tokens, positions_BT=positions, **options), targets)
        (loss / count).backward()
        first = sum(sizes[: model.position])
        mine = slice(first, first + sizes[model.position])
        report.phase = f"forward {index}"
        if case.form == "loss_fn":
            options["loss_inputs"] = (targets[mine],)
        if sizes[model.position] or case.recalls:
            output = model(tokens[mine], positions_BT=positions[mine], **options)
        else:
            output = model()
        if case.form == "loss_fn":
            loss_sum, num_targets = output
        else:
            loss_sum, num_targets = loss_of(case, output, targets[mine])
        report.phase = f"backward {index}"
        mean = model.backward(loss_sum, num_targets)
        expected = float(loss.detach() / count)
        if mean is None or abs(mean - expected) > LOSS_BAR * abs(expected):
            report.mismatches.append(f"loss of step {index}: {mean} for {expected}")
        for optimizer in optimizers:
            optimizer.step()
        try:
            compare_params(model, plain, bar=PARAM_BAR["sgd"], where=f"step {index}")
        except AssertionError as error:
            report.mismatches.append(" ".join(str(error).split())[:200])


@dataclass(frozen=True, kw_only=True)
class TraitRow:
    """One case."""

    seed: int
    trait: str
    form: str
    world_size: int
    verdict: str
    phase: str
    seconds: float
    reason: str


def main() -> None:
    """The campaign and its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs=2, type=int, metavar=("FIRST", "STOP"))
    parser.add_argument("--to", type=Path, help="file for the rows of --seeds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    court, rows = Court(run_on_rank=run_on_rank), []
    for seed in range(*(arguments.seeds or (0, NUM_CASES))):
        case = draw_case(seed)
        judgement, seconds = court.judge(case)
        rows.append(
            TraitRow(
                seed=seed,
                trait=case.trait,
                form=case.form,
                world_size=case.world_size,
                verdict=judgement.verdict.value,
                phase=judgement.phase,
                seconds=round(seconds, 2),
                reason=" ".join(judgement.reason.split())[:240],
            )
        )
        if len(rows) % 10 == 0 and arguments.to:
            write_csv(arguments.to, rows)
    court.close()
    path = arguments.to or (None if arguments.seeds else HERE / "traits.csv")
    if path is not None:
        write_csv(path, rows)
    console.print(as_markdown(rows), markup=False, soft_wrap=True)


def as_markdown(rows: list[TraitRow]) -> str:
    """Verdicts by trait and form."""
    counts = Counter((f"{row.trait}: {row.form}", row.verdict) for row in rows)
    names = sorted({name for name, _ in counts})
    table = [[name, *(str(counts[name, each]) for each in VERDICTS)] for name in names]
    return markdown_table(["trait", *VERDICTS], table)


if __name__ == "__main__":
    main()
