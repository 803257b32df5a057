"""Sample a little text from a decoder whose parameters stay sharded."""

from collections.abc import Sequence

import numpy as np
import torch

from shardhet.fsdp import HetFSDP


@torch.no_grad()
def sample_tokens(
    model: HetFSDP,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    seq_len: int,
    temperature: float = 0.8,
    seed: int = 0,
    device: torch.device | None = None,
) -> list[int]:
    """Sample ``num_tokens`` tokens that continue ``prompt``.  Collective.

    Every rank that computes runs the same single sample; the first of them draws the tokens.
    """
    ranks = model.plan.ranks
    drawer = next(i for i, rank in enumerate(ranks) if rank.rank_batch_size)
    computes = ranks[model.position].rank_batch_size > 0
    generator = np.random.Generator(np.random.Philox(key=seed))
    text = list(prompt)
    model.eval()
    for _ in range(num_tokens):
        window = torch.tensor([text[-seq_len:]], device=device)
        output = model(window if computes else window[:0])
        token = -1.0
        if model.position == drawer:
            scores = output[0, -1].double() / temperature
            odds = scores.softmax(dim=0).cpu().numpy()
            token = float(generator.choice(len(odds), p=odds))
        text.append(int(model.exchange([token])[drawer][0]))
    model.train()
    return text[len(prompt) :]
