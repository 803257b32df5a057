"""Rows of ragged arguments, such as patches of images, go with the samples that they are of."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shardhet import HetFSDP, Plan
from shardhet.records.plan import Stage
from tests.ordinary import says
from tests.parity import compare_grads, compare_params
from tests.test_model_hf import double_norms
from tests.worlds import TRANSFORMERS, on_ranks, preload, run_ranks, run_ranks_expecting_failure

preload(*TRANSFORMERS)

LENGTH, IMAGE, WIDTH = 14, 5, 8
Grid = tuple[int, int, int]
LARGE, FLAT, SMALL = (1, 4, 4), (1, 2, 4), (1, 2, 2)
Images = Sequence[Sequence[Grid]]  # of each sample

IN_ALL: Images = [[LARGE], [FLAT, SMALL], [SMALL], [LARGE, FLAT], [FLAT], [SMALL, SMALL]]
ALIKE: Images = [[LARGE]] * 6
IN_SOME: Images = [[], [FLAT, SMALL], [LARGE], [], [], [SMALL]]
IN_ONE: Images = [[], [], [], [LARGE, SMALL], [], []]
IN_NONE: Images = [[]] * 6
ON_FIRST: Images = [[LARGE], [FLAT], [], [], [], []]

PLANS = {
    "2-1": Plan.by_hand(microbatch_sizes=[2, 1]),
    "1-0-2": Plan.by_hand(microbatch_sizes=[1, 0, 2], recompute=[True, False, False]),
    "cut": Plan.by_hand(microbatch_sizes=[2, 1], rank_batch_sizes=[4, 2]),
    "rounds": Plan.by_hand(microbatch_sizes=[1, 1], rank_batch_sizes=[2, 1], num_rounds=2),
}


def model_of(kind: str) -> nn.Module:
    """A tiny model of transformers with a tower for images."""
    transformers = pytest.importorskip("transformers")
    name = {"qwen2_5_vl": "Qwen2_5_VL", "qwen2_vl": "Qwen2VL", "qwen3_vl": "Qwen3VL"}[kind]
    text = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 40,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
    }
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "embed_dim": 16,
        "out_hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 2,
        "temporal_patch_size": 1,
        "spatial_merge_size": 2,
        "window_size": 8,
        "fullatt_block_indexes": [1],
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
        "in_channels": 2,
        "mlp_ratio": 2,
    }
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=6
    )
    torch.manual_seed(5)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).double()


def sample_of(grids: Sequence[Grid]) -> dict[str, Tensor]:
    """A text with its images, behind up to two words that do not count."""
    padding = int(torch.randint(3, ()))
    tokens = [h * w // 4 for _, h, w in grids]
    ids = [torch.ones(padding, dtype=torch.int64), torch.randint(10, 40, (1,))]
    for number in tokens:
        ids += [torch.full((number,), IMAGE), torch.randint(10, 40, (1,))]
    ids += [torch.randint(10, 40, (LENGTH - sum(map(len, ids)),))]
    text = torch.cat(ids)
    return {
        "input_ids": text[None],
        "attention_mask": (torch.arange(LENGTH) >= padding).long()[None],
        "mm_token_type_ids": (text == IMAGE).int()[None],
        "pixel_values": torch.randn(4 * sum(tokens), WIDTH, dtype=torch.float64),
        "image_grid_thw": torch.tensor(grids, dtype=torch.int64).view(-1, 3),
    }


def put_together(samples: Sequence[dict[str, Tensor]], *, has_images: bool) -> dict[str, Any]:
    batch = {key: torch.cat([each[key] for each in samples]) for key in samples[0]}
    names = () if has_images else ("pixel_values", "image_grid_thw")
    return {key: tensor for key, tensor in batch.items() if key not in names}


def loss_of(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, int]:
    logits = model(**batch).logits
    targets = batch["input_ids"][:, 1:].flatten()
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum")
    return loss, len(targets)


STEPS = [IN_ALL, IN_SOME, ALIKE, IN_NONE, IN_ONE, ON_FIRST, IN_ALL]


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "qwen2_5_vl") for name in PLANS), ("1-0-2", "qwen2_vl"), ("cut", "qwen3_vl")],
)
@on_ranks(lambda name, **_: PLANS[name].world_size)
@double_norms()
def test_images_in_all_some_and_no_samples_train_as_in_one_process(
    rank: int, name: str, kind: str
) -> None:
    plan, steps = PLANS[name], STEPS
    plain = model_of(kind)
    model = HetFSDP(copy.deepcopy(plain), plan)
    units = dict.fromkeys((fqn for fqn, _ in plain.named_parameters()), "all")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (plain, model)]
    for i, images in enumerate(steps):
        torch.manual_seed(20 + i)
        samples = [sample_of(each) for each in images[: plan.global_batch_size]]
        has_images = any(images[: plan.global_batch_size])
        for num_round in range(plan.num_rounds):
            own = plan.round_samples(model.position, num_round)
            none = put_together([sample_of([])], has_images=has_images)
            mine = samples[own.start : own.stop]
            batch = (
                put_together(mine, has_images=has_images)
                if mine
                else {key: tensor[:0] for key, tensor in none.items()}
            )
            mean = model.backward(*loss_of(model, batch))
        loss, number = loss_of(plain, put_together(samples, has_images=has_images))
        (loss / number).backward()
        assert mean == pytest.approx(loss.item() / number, rel=1e-12)
        compare_grads(model, plain, units, where=f"step {i}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        compare_params(model, plain, bar=1e-12, where=f"step {i}")


class Tower(nn.Module):
    """Rows that see those of their own sample, or also those of others."""

    def __init__(self, *, mixes: bool, p: float) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(p)
        self.mixes = mixes

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        parts = [x] if self.mixes else [each for each in x.split(lengths.tolist()) if len(each)]
        return self.drop(torch.cat([self.inner(each - each.mean(0)) for each in parts]))


class Album(nn.Module):
    """Texts with any number of patches each, the sum of which is added to their words."""

    def __init__(self, *, mixes: bool = False, p: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(40, WIDTH)
        self.towers = nn.ModuleList(Tower(mixes=mixes, p=p) for _ in range(2))
        self.head = nn.Linear(WIDTH, 40)

    def forward(self, ids: Tensor, lengths: Tensor, patches: Tensor | None) -> Any:
        x = self.words(ids)
        if patches is not None:
            for tower in self.towers:
                patches = tower(patches, lengths)
            owners = torch.arange(len(ids)).repeat_interleave(lengths)
            sums = torch.zeros_like(x[:, 0]).index_add(0, owners, patches)
            x = x + sums.unsqueeze(1)
        logits = self.head(x)[:, :-1].flatten(0, 1)
        targets = ids[:, 1:].flatten()
        return functional.cross_entropy(logits, targets, reduction="sum"), len(targets)


LENGTHS = [(2, 1, 3, 2, 4, 1), (2, 2, 2, 2, 2, 2), (0, 0, 3, 0, 1, 2), (1, 1, 1, 1, 1, 1)]


def train_album(rank: int, plan: Plan, options: dict[str, Any]) -> None:
    torch.manual_seed(5)
    plain = Album(**options).double()
    model = HetFSDP(
        copy.deepcopy(plain),
        plan,
        units=[Tower, "head", "words"],
        ragged={"patches": lambda batch: batch["lengths"]},
    )
    units = dict.fromkeys((fqn for fqn, _ in plain.named_parameters()), "all")
    for step, lengths in enumerate(LENGTHS):
        number = plan.global_batch_size
        whole = {
            "ids": torch.randint(0, 40, (number, 4)),
            "lengths": torch.tensor(lengths[:number]),
            "patches": torch.randn(sum(lengths[:number]), WIDTH, dtype=torch.float64),
        }
        mine = plan.sample_indices(model.position)
        places = torch.arange(number).repeat_interleave(whole["lengths"])
        of_rank = torch.isin(places, torch.tensor(mine, dtype=torch.int64))
        mean = model.forward_backward(
            whole["ids"][mine], whole["lengths"][mine], patches=whole["patches"][of_rank]
        )
        loss, tokens = plain(**whole)
        (loss / tokens).backward()
        assert mean == pytest.approx(loss.item() / tokens, rel=1e-12)
        compare_grads(model, plain, units, where=f"step {step}")
        for each in (plain, model):
            each.zero_grad()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_declared_rows_go_with_their_samples(plan: Plan) -> None:
    run_ranks(train_album, len(plan.ranks), plan, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixes": True}, "depends for one sample on the other samples"),
        ({"p": 0.1}, "and has dropout"),
    ],
)
def test_towers_whose_result_depends_on_the_plan_are_refused(
    options: dict[str, Any], message: str
) -> None:
    says(run_ranks_expecting_failure(train_album, 2, PLANS["2-1"], options), message)


def test_stages_refuse_them() -> None:
    stages = [
        Stage(units=("words", "towers.*"), num_ranks=1),
        Stage(units=("head",), num_ranks=1),
    ]
    plan = Plan.by_hand(microbatch_sizes=[2, 2], num_rounds=2, stages=stages)
    outcomes = run_ranks_expecting_failure(train_album, 2, plan, {})
    says(outcomes, "the plan has stages, but rows of a ragged argument (patches)")


@on_ranks(1)
def test_rows_that_fit_no_samples_are_refused(rank: int) -> None:
    plan = Plan.by_hand(microbatch_sizes=[3])
    model = HetFSDP(Album(), plan, ragged={"patches": lambda batch: batch["lengths"]})
    with pytest.raises(ValueError, match=r"'patches' has 5 rows for 3 samples .* \[2, 1, 1\]"):
        model(torch.zeros(3, 4).long(), torch.tensor([2, 1, 1]), torch.randn(5, WIDTH))
