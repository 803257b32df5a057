"""Devices that compute the same samples, each its part of the tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardhet import HetFSDP, Plan
from shardhet.fsdp.microbatch.loss import FusedLoss
from shardhet.fsdp.tokens import attention
from shardhet.fsdp.tokens.cutting import TokenCutter
from shardhet.fsdp.tokens.skeleton import Skeleton
from shardhet.records.stages import token_spans
from tests import trainer_options as given
from tests.beside import Beside
from tests.context_cases import VOCAB_SIZE, Case, Plain
from tests.emulated.accelerator import Accelerator
from tests.worlds import ends_all_ranks, on_ranks, run_ranks

PAIR = Plan.by_hand(microbatch_sizes=[1, 1], context_groups=[[0, 1]], token_shares=[3, 1])


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5, 23])
@on_ranks(3)
def test_steps_are_those_of_one_process(rank: int, seed: int) -> None:
    Case.drawn(seed, 3).run()


def run_twice(rank: int, seed: int) -> None:
    """Every step is that of one process, and a repeat has the same bits."""
    case = Case.drawn(seed)
    first, second = (
        [p.detach().as_subclass(Tensor).clone() for p in case.run().parameters()]
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(200))
def test_drawn_plans_are_exact_and_repeat_to_the_bit(seed: int) -> None:
    run_ranks(run_twice, Case.drawn(seed).plan.world_size, seed, timeout_s=120.0)


@on_ranks(2)
def test_one_member_may_have_tiles(rank: int) -> None:
    """What it tries, on as many tokens as it has here, it tries without the other."""
    plan = Plan.by_hand(
        microbatch_sizes=[1, 1],
        context_groups=[[0, 1]],
        token_shares=[3, 1],
        tiles=[True, False],
        tokens_per_tile=4,
    )
    Case(plan=plan, model="decoder", num_tokens=24).run()


@on_ranks(3)
def test_steps_on_an_accelerator_are_those_of_one_process(rank: int) -> None:
    """Where streams wait for each other, as with NCCL, or a race is found.

    A try has threads, in which the emulated one is not there; nor are its kernels.
    """
    case = replace(Case.drawn(1, 3), model="decoder")
    not_tried = mock.patch.object(Skeleton, "check")
    with Accelerator().installed() as accelerator, not_tried:
        device = accelerator.device

        def mask(number: int, keys: int) -> Tensor:
            return torch.ones(number, keys, dtype=torch.bool, device=device).tril(keys - number)

        with mock.patch.object(attention, "causal_lower_right", mask):
            case.run(device=device)


def test_a_group_is_dealt_samples_once() -> None:
    plan = Plan.by_hand(
        microbatch_sizes=[2, 2, 1, 0],
        rank_batch_sizes=[4, 4, 2, 0],
        num_rounds=2,
        context_groups=[[0, 1]],
        token_shares=[3, 1, 1, 1],
    )
    assert plan.global_batch_size == 12
    mine = [plan.sample_indices(i) for i in range(4)]
    assert mine[0] == mine[1] == [0, 1, 2, 3, 6, 7, 8, 9]
    assert mine[2:] == [[4, 5, 10, 11], []]
    assert [rank.token_share for rank in plan.ranks] == [0.75, 0.25, None, None]
    assert Plan.from_json(plan.to_json()) == plan
    assert "75.00%" in str(plan)
    assert "token_share" not in Plan.even(2, microbatch_size=1).to_json()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"context_groups": [[0, 2]]}, "adjacent"),
        ({"context_groups": [[0]]}, "two or more"),
        ({"context_groups": [[0, 1], [1, 2]]}, "may be in one group"),
        ({"context_groups": [[2, 3]]}, "positions 0 to 2"),
        ({"context_groups": [[1, 2]]}, "the same microbatches"),
        ({"context_groups": [[0, 1]], "token_shares": [1, 0, 1]}, "above 0"),
        ({"context_groups": [[0, 1]], "token_shares": [1, 1]}, "token_shares has 2"),
    ],
)
def test_groups_that_cannot_be_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Plan.by_hand(microbatch_sizes=[2, 2, 1], **changes)


@pytest.mark.parametrize("num_tokens", [6, 7, 10, 41, 4096])
def test_each_token_is_one_members_and_pairs_go_by_tokens(num_tokens: int) -> None:
    shares = [5.0, 2.0, 1.0]
    spans = token_spans(num_tokens, shares)
    found = sorted(i for each in spans for span in each for i in range(span.start, span.stop))
    assert found == list(range(num_tokens))
    for each, share in zip(spans, shares, strict=True):
        numel = sum(span.numel for span in each)
        pairs = sum(i + 1 for span in each for i in range(span.start, span.stop))
        assert numel >= 2
        assert pairs == numel * (num_tokens + 1) / 2  # whatever its share is
        if num_tokens == 4096:
            assert numel == num_tokens * share / 8


class Odd(Plain):
    """What it computes of a token depends on others in the way of its name."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm = nn.BatchNorm1d(4) if how == "batch norm" else nn.Identity()

    def forward(self, ids: Tensor, targets: Tensor, position_ids: Any = None) -> Any:
        places = None if self.how == "counts positions" else position_ids
        if self.how == "begins at 2" and places is None:
            places = torch.arange(2, 2 + ids.shape[1])
        found, number = super().forward(ids, targets, places)
        if self.how == "mean":
            return found / number, number
        return (
            (found, torch.full((), targets.numel()))
            if self.how == "counts"
            else (found, number)
        )


ODD = {
    "counts positions": "depends for one token on the other tokens. A device has only its own",
    "mean": "no sum over tokens",
    "batch norm": "batch norm 'norm'",
    "begins at 2": "another way than 0, 1, 2",
}


class Counting(Plain):
    """It counts the tokens that are no padding, where it is not told positions."""

    def forward(
        self, ids: Tensor, targets: Tensor, attention_mask: Any, position_ids: Any = None
    ) -> Any:
        places = (
            (attention_mask.cumsum(1) - 1).clamp(0) if position_ids is None else position_ids
        )
        return super().forward(ids, targets, places)


def called_with(module: nn.Module, *given: Any, **options: Any) -> Any:
    """What the second of two members is given, if the model may be computed by tokens."""
    cutter = TokenCutter(module, [3.0, 1.0], 1)
    skeleton = Skeleton(module, FusedLoss(None), options.pop("batch_dim", 0))
    return cutter.cut((given, options, ()), skeleton.check)


@pytest.mark.parametrize("how", ODD)
def test_what_mixes_tokens_is_refused_by_name(how: str) -> None:
    ids = torch.randint(VOCAB_SIZE, (1, 24))
    with pytest.raises(ValueError, match=ODD[how]):
        called_with(Odd(how), ids, ids)


def test_padding_before_tokens_that_a_model_counts_is_refused() -> None:
    ids = torch.randint(VOCAB_SIZE, (2, 40))
    mask = torch.ones_like(ids)
    mask[0, -25:] = 0
    called_with(Counting(), ids, ids, attention_mask=mask)
    with pytest.raises(ValueError, match="another way than 0, 1, 2"):
        called_with(Counting(), ids, ids, attention_mask=mask.flip(1))


def test_a_member_gets_its_tokens_and_where_they_are() -> None:
    ids = torch.arange(48).view(2, 24)
    args, kwargs, _ = called_with(Odd(""), ids, ids)
    assert args[0].tolist() == [[*range(9, 15)], [*range(33, 39)]]
    assert kwargs["position_ids"].tolist() == [[*range(9, 15)]] * 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_tokens": 3}, "needs 4"),
        ({"batch_dim": 1}, "batch_dim"),
        ({"extra": torch.zeros(2, 1, 24, 24)}, "elsewhere than in its second"),
    ],
)
def test_arguments_that_cannot_be_cut_are_refused(options: dict[str, Any], says: str) -> None:
    ids = torch.zeros(2, options.pop("num_tokens", 24), dtype=torch.long)
    with pytest.raises(ValueError, match=says):
        called_with(Odd(""), ids, ids, **options)


@pytest.mark.parametrize("first", [32, 40])
@on_ranks(3)
def test_labels_of_a_prompt_or_of_all_tokens_may_be_left_out(rank: int, first: int) -> None:
    torch.manual_seed(0)
    plan = Plan.by_hand(microbatch_sizes=[1, 1, 1], context_groups=[[0, 1]])
    ids = torch.randint(VOCAB_SIZE, (2, 40))
    labels = ids.clone()
    labels[0, :first] = -100
    Beside(Plain().double(), plan).step(ids, labels)


@ends_all_ranks(2, "unlike samples")
def test_members_need_the_same_samples(rank: int) -> None:
    ids = torch.full((1, 24), rank)
    HetFSDP(Plain(), PAIR)(ids, ids)


@ends_all_ranks(2, "24 tokens but this rank has")
def test_tokens_are_counted_once(rank: int) -> None:
    model, ids = HetFSDP(Plain(), PAIR), torch.zeros(1, 24, dtype=torch.long)
    loss_sum, _ = model(ids, ids)
    model.backward(loss_sum, ids.numel())


@on_ranks(2)
def test_evaluation_and_generation_see_whole_samples(rank: int) -> None:
    torch.manual_seed(0)
    both = Beside(Plain().double(), PAIR)
    ids = torch.randint(VOCAB_SIZE, (1, 24))
    both.step(ids, ids)
    with torch.no_grad():
        both.model.eval()
        mine = both.model(ids, ids)
        sums = map(sum, zip(*both.model.exchange([float(each) for each in mine]), strict=True))
        expected, number = both.plain.eval()(ids, ids)
        torch.testing.assert_close(
            list(sums), [float(expected), float(number)], rtol=1e-12, atol=0
        )
        with both.model.unit_by_unit():
            found, _ = both.model.module(ids, ids)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@on_ranks(2)
def test_members_drop_other_tokens(rank: int) -> None:
    seen: list[Tensor] = []
    model = HetFSDP(
        Plain(dropout=0.5), Plan.by_hand(microbatch_sizes=[1, 1], context_groups=[[0, 1]])
    )
    dropout, ids = F.dropout, torch.zeros(1, 24, dtype=torch.long)
    with mock.patch.object(
        F, "dropout", lambda *a, **k: seen.append(dropout(*a, **k)) or seen[-1]
    ):
        model(ids, ids)
    masks = model.exchange_objects((seen[-1] == 0).flatten().tolist())
    assert len(masks[0]) == len(masks[1])
    assert masks[0] != masks[1]


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """To the longest sample, but to four tokens at least."""
    longest = max(4, *(int(row["attention_mask"].sum()) for row in rows))
    return {name: torch.stack([row[name][:longest] for row in rows]) for name in rows[0]}


def trained_by(trainer_class: Any, folder: str, changes: dict[str, Any], **options: Any) -> Any:
    none = {"compute_loss_func": None, "compute_metrics": None}
    trainer = given.make(trainer_class, folder, {"max_steps": 4, **changes}, **none, **options)
    trainer.train()
    model = getattr(trainer, "het", trainer.model)
    return {
        "state": model.state_dict(),
        "log": trainer.state.log_history,
        "flops": trainer.state.total_flos,
    }


HF_PLAN = Plan.by_hand(
    microbatch_sizes=[1, 1, 1],
    rank_batch_sizes=[2, 2, 1],
    context_groups=[[0, 1]],
    token_shares=[2, 1, 1],
)


@pytest.mark.parametrize(
    ("num_rounds", "changes"),
    [(1, {}), (2, {"gradient_accumulation_steps": 2}), (1, {"data_collator": "padded"})],
)
@on_ranks(3, timeout_s=200.0)
def test_trainers_count_a_group_once(
    rank: int, num_rounds: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Losses of transformers' own are computed in float32."""
    from shardhet.hf import HetTrainer

    plan, changes = replace(HF_PLAN, num_rounds=num_rounds), dict(changes)
    collate = padded if changes.pop("data_collator", None) else None
    with given.as_torchrun_starts(rank, 3):
        found = trained_by(HetTrainer, str(tmp_path), changes, plan=plan, data_collator=collate)
    if rank == 0:
        sizes = {
            "per_device_train_batch_size": plan.global_batch_size,
            "per_device_eval_batch_size": 3,
        }
        alone = str(tmp_path / "alone")
        expected = trained_by(
            given.transformers.Trainer, alone, {**changes, **sizes}, data_collator=collate
        )
        logged, of_params = given.difference(found, expected)
        assert logged < 1e-5
        assert of_params < 1e-6
