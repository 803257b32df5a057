"""What both versions train; imported by trees of any age, so it knows no more than they do."""

from dataclasses import dataclass

from experiments.decoders import decoder_config
from shardhet import Plan
from shardhet.models.decoder import DecoderConfig


@dataclass(frozen=True, slots=True)
class Case:
    """A model under a plan."""

    name: str
    config: DecoderConfig
    plan: Plan
    steps_per_turn: int  # besides the first


_SMALL = decoder_config(width=256, num_layers=6, seq_len=128)  # of even_against_fsdp2
_TINY = decoder_config(width=64, num_layers=8, seq_len=32)
_DEEP = decoder_config(width=128, num_layers=32, seq_len=64)

CASES = {
    case.name: case
    for case in (
        Case("2 ranks, 1 x 8", _SMALL, Plan.even(2, microbatch_size=8, num_microbatches=1), 2),
        Case("2 ranks, 4 x 8", _SMALL, Plan.even(2, microbatch_size=8, num_microbatches=4), 1),
        Case("1 rank, 1 x 8", _SMALL, Plan.even(1, microbatch_size=8, num_microbatches=1), 2),
        Case(
            "4 unlike ranks",  # as mixed_cluster plans them, without slowing anybody down
            _SMALL,
            Plan.by_hand(
                microbatch_sizes=[4, 3, 2, 1],
                rank_batch_sizes=[16, 9, 4, 1],
                state_shares=[0.45, 0.3, 0.05, 0.2],
                recompute=[False, False, True, False],
            ),
            1,
        ),
        Case(
            "small kernels, 2 ranks, 16 x 1 and 8 x 1",  # the runtime's own time
            _TINY,
            Plan.by_hand(
                microbatch_sizes=[1, 1], rank_batch_sizes=[16, 8], state_shares=[0.5, 0.5]
            ),
            12,
        ),
        Case(
            "32 blocks, 2 ranks, 2 x 2",
            _DEEP,
            Plan.even(2, microbatch_size=2, num_microbatches=2),
            2,
        ),
    )
}
