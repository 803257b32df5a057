"""Steps of context groups beside one process that has whole samples.

case = Case.drawn(seed)      # a plan with groups, a model, its rows
case.run()                   # on every rank: raises at the first difference
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardhet import HetFSDP, Plan
from shardhet.models.decoder import Decoder
from tests.beside import Beside
from tests.checkpoint_cases import FORMS
from tests.parity import clip_both
from tests.small_models import small_decoder

VOCAB_SIZE, WIDTH, NUM_STEPS = 61, 16, 3
MOST_RANKS, LEAST_TOKENS = 7, 8


class Block(nn.Module):
    """A block of torch's own modules."""

    def __init__(self, *, is_causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.is_causal, self.dropout = nn.LayerNorm(WIDTH), is_causal, dropout
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y, size = self.norm(x), x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(size, device=x.device)
        seen = {"attn_mask": mask, "is_causal": True} if self.is_causal else {}
        x = x + self.attention(y, y, y, need_weights=False, **seen)[0]
        return x + F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training)


class Plain(nn.Module):
    """Embeddings of tokens and positions, blocks and a head; it returns what a loss would."""

    def __init__(self, *, is_causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCAB_SIZE, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(
            Block(is_causal=is_causal, dropout=dropout) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)

    def forward(self, ids: Tensor, targets: Tensor, position_ids: Tensor | None = None) -> Any:
        places = torch.arange(ids.shape[1]) if position_ids is None else position_ids
        x = self.embedding(ids) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return of_logits(self.head(x), targets)


def of_logits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    flat = logits.flatten(0, 1), targets.flatten()
    return F.cross_entropy(*flat, ignore_index=-100, reduction="sum"), (targets != -100).sum()


def llama() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        max_position_embeddings=64,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    for each in model.modules():  # transformers' own computes in float32
        if type(each).__name__ == "LlamaRMSNorm":
            each.forward = _norm.__get__(each)  # type: ignore[method-assign]
    return model


def _norm(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder": lambda: Decoder(
        small_decoder(vocab_size=VOCAB_SIZE, num_heads=4, num_kv_heads=2)
    ),
    "plain": Plain,
    "both ways": lambda: Plain(is_causal=False),
    "llama": llama,
    "llama, padded": llama,
    "llama, packed": llama,
}


def loss(model: nn.Module, ids: Tensor, targets: Tensor, *more: Tensor) -> tuple[Tensor, Any]:
    """The sum of the losses, and their number."""
    if not more:
        return model(ids, targets)  # type: ignore[no-any-return]
    mask, positions = more
    if len(ids) and bool((mask == 0).any()):  # ragged: to its longest, which a group can share
        longest = max(LEAST_TOKENS, int(mask.sum(-1).max()))
        ids, targets, mask = (each[:, :longest] for each in (ids, targets, mask))
    kwargs = {"attention_mask": mask} if mask.numel() and bool((mask != 1).any()) else {}
    if positions.numel() and int(positions.diff(dim=-1).min()) < 1:
        kwargs = {"position_ids": positions}
    logits = model(input_ids=ids, **kwargs).logits
    own = targets
    if isinstance(model, HetFSDP) and len(ids):
        own = model.own_tokens(targets)
    return of_logits(logits[..., : own.shape[-1], :], own)


def _parts(draw: random.Random, world_size: int | None) -> list[tuple[int, bool]]:
    """The number of members of each group, 1 for a rank alone, and whether that only stores."""
    while True:
        found = [(draw.choice([2, 2, 3, 4]), False) for _ in range(draw.randint(1, 3))]
        found += [(1, draw.random() < 0.5) for _ in range(draw.choice([0, 0, 1, 2]))]
        draw.shuffle(found)
        total = sum(number for number, _ in found)
        if total == world_size or (world_size is None and total <= MOST_RANKS):
            return found


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained by which plan."""

    plan: Plan
    model: str
    num_tokens: int
    seed: int = 0

    @classmethod
    def drawn(cls, seed: int, world_size: int | None = None) -> "Case":
        """One to three groups of 2 to 4, ranks alone, and ranks that only store.

        Without ``world_size`` there are at most ``MOST_RANKS``.
        """
        draw = random.Random(seed)
        parts = _parts(draw, world_size)
        sizes, batches, groups = list[int](), list[int](), list[list[int]]()
        for number, stores in parts:
            members = list(range(len(sizes), len(sizes) + number))
            groups += [members] * (number > 1)
            size, batch = (0, 0) if stores else (draw.randint(1, 3), draw.randint(1, 4))
            sizes += [size] * number
            batches += [batch] * number
        world_size = len(sizes)
        model = draw.choice(list(MODELS))
        blocks = "model.layers" if "llama" in model else "blocks"
        patterns: list[Any] = [False, False, True, [f"{blocks}.1"], [f"{blocks}.*"]]
        tiles: list[Any] = [False, False, True, [f"{blocks}.1"]]
        if draw.random() < 0.5:  # of plans no member has tiles
            tiles = [False]
        weights = [draw.random() + 0.05 for _ in range(world_size)]
        again = [draw.choice(patterns) for _ in range(world_size)]
        plan = Plan.by_hand(
            microbatch_sizes=sizes,
            rank_batch_sizes=batches,
            state_shares=[w / sum(weights) for w in weights],
            recompute=again,
            num_rounds=draw.choice([1, 1, 2, 3]),
            inputs_on_host=[each is not False and draw.random() < 0.2 for each in again],
            optimizer_on_host=[draw.random() < 0.1 for _ in range(world_size)],
            **draw.choice(FORMS),
            context_groups=groups,
            token_shares=[draw.choice([1.0, 2.0, 5.0]) for _ in range(world_size)],
            tiles=[draw.choice(tiles) for _ in range(world_size)],
            tokens_per_tile=draw.randint(2, 4),
        )
        if draw.random() < 0.3:
            last = draw.randint(1, plan.round_size)
            plan = replace(plan, last_round_size=last)
        return cls(
            plan=plan,
            model=model,
            num_tokens=draw.randint(LEAST_TOKENS, 24),
            seed=seed,
        )

    def batch(self, step: int) -> list[Tensor]:
        """Rows of one length, with what a model of transformers takes beside them."""
        draw = torch.Generator().manual_seed(100 * self.seed + step)
        shape = self.plan.global_batch_size, self.num_tokens
        ids = torch.randint(VOCAB_SIZE, shape, generator=draw)
        targets = ids.roll(-1, 1)
        targets[:, -1] = -100
        targets[torch.rand(shape, generator=draw) < 0.2] = -100
        if "llama" not in self.model:
            return [ids, targets.masked_fill(targets < 0, -1) if self.is_own else targets]
        mask, at = torch.ones(shape, dtype=torch.long), torch.arange(self.num_tokens)
        positions = at.expand(shape).clone()
        if "padded" in self.model:
            lengths = torch.randint(2, self.num_tokens + 1, shape[:1], generator=draw)
            mask = (at < lengths[:, None]).long()
        if "packed" in self.model:
            borders = torch.randint(1, self.num_tokens, shape[:1], generator=draw)[:, None]
            positions = torch.where(at < borders, at, at - borders)
            targets[at == borders - 1] = -100
        return [ids, targets.masked_fill(mask == 0, -100), mask, positions]

    @property
    def is_own(self) -> bool:
        return self.model == "decoder"

    def run(self, **options: Any) -> HetFSDP:
        """Three steps of AdamW with clipping, each as in one process."""
        torch.manual_seed(self.seed)
        module = MODELS[self.model]().double()
        both = Beside(module, self.plan, loss=loss, **options)
        optimizers = both.optimizers(torch.optim.AdamW, lr=1e-3)
        for step in range(NUM_STEPS):
            both.step(*self.batch(step))
            clip_both(both.model, both.plain, 0.5)
            for optimizer in optimizers:
                optimizer.step()
        return both.model
