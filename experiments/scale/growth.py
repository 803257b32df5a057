"""Depth, width and sequence: does the even plan keep up with FSDP2 as the model grows?

One launch for all models, so that they meet the same machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from experiments.common import systems
from experiments.common.launch import run_ranks
from experiments.common.results import Bar, Table
from experiments.common.systems import FSDP2, HET, Rounds
from experiments.decoders import (
    decoder_config,
    make_decoder,
    num_params,
    random_batches,
    units_of,
)
from experiments.scale import records
from experiments.scale.records import Effort, Part, Report, Sample, cases_in, ms_spread, spread
from shardhet import HetFSDP, Plan
from shardhet.models.decoder import DecoderConfig

NAME = "growth"
NUM_RANKS = 2
RANK_BATCH_SIZE = 4
LEARNING_RATE = 1e-3
QUANTITY = "step_s"
MOST_OF_FSDP2 = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One size of the decoder."""

    num_layers: int = 4
    width: int = 256
    seq_len: int = 128

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.num_layers} layers, width {self.width}, {self.seq_len} tokens"

    @property
    def config(self) -> DecoderConfig:
        """As the decoder wants it."""
        return decoder_config(
            width=self.width, num_layers=self.num_layers, seq_len=self.seq_len
        )


BASE = Model()
MODELS = (
    *(replace(BASE, num_layers=n) for n in (2, 4, 8, 16)),
    *(replace(BASE, width=n) for n in (128, 512)),
    *(replace(BASE, seq_len=n) for n in (64, 256)),
)
QUICK_MODELS = (replace(BASE, num_layers=2, width=128), replace(BASE, num_layers=4, width=128))


def measure(effort: Effort) -> list[Sample]:
    """All models in one launch."""
    models = QUICK_MODELS if effort.is_quick else MODELS
    rounds = effort.rounds(5, 3)
    return run_ranks(_measure_rank, NUM_RANKS, models, rounds)[0]


def _measure_rank(rank: int, models: Sequence[Model], rounds: Rounds) -> list[Sample]:
    return [sample for model in models for sample in _measure_model(model, rounds)]


def _measure_model(model: Model, rounds: Rounds) -> list[Sample]:
    config = model.config
    [batch] = random_batches(config, RANK_BATCH_SIZE, seed=dist.get_rank())
    plan = Plan.even(NUM_RANKS, microbatch_size=RANK_BATCH_SIZE)
    ours, theirs = HetFSDP(make_decoder(config), plan), make_decoder(config)
    contestants = [
        systems.het_fsdp(ours, systems.fused_adamw(ours.parameters(), LEARNING_RATE)),
        systems.fsdp2(theirs, units_of(theirs), LEARNING_RATE),
    ]
    seconds = records.step_seconds(contestants, batch, rounds)
    return records.samples_of(NAME, model.name, QUANTITY, seconds)


def report(samples: Sequence[Sample]) -> Report:
    """One row per model."""
    model_by_name = {model.name: model for model in (*QUICK_MODELS, *MODELS)}
    rows, ratios = [], []
    for case in cases_in(samples):
        ours, theirs = (spread(samples, case, name, QUANTITY) for name in (HET, FSDP2))
        ratios.append(ours.median / theirs.median)
        parameters = f"{num_params(model_by_name[case].config) / 1e6:.1f} M"
        rows.append([case, parameters, ms_spread(ours), ms_spread(theirs), f"{ratios[-1]:.3f}"])
    table = Table(
        title=f"Growth: {NUM_RANKS} ranks, {RANK_BATCH_SIZE} samples each, step ms (p10-p90)",
        header=["model", "parameters", HET, FSDP2, f"{HET} / {FSDP2}"],
        rows=rows,
    )
    bar = Bar(
        claim=f"growth: step time, {HET} / {FSDP2}, the worst model",
        measured=max(ratios),
        at_most=MOST_OF_FSDP2,
    )
    return Report(tables=[table], bars=[bar])


PART = Part(name=NAME, measure=measure, report=report)
