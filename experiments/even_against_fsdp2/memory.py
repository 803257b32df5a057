"""Resident memory of a rank under HetFSDP and under FSDP2, above what it had before.

Each system gets processes of its own.  The level is taken after ``init_process_group``, with
the code of both systems imported; what counts is the highest resident set after that, as the
kernel keeps it, once for everything (model built, cut up, trained) and once for the steps
alone.
"""

import gc
from dataclasses import dataclass

import torch

from experiments.common.systems import FSDP2, HET, System
from experiments.common.unlike import MIB, forget_peak
from experiments.decoders import decoder_config, num_params
from experiments.even_against_fsdp2.speed import fsdp2, het_fsdp
from shardhet import Plan
from shardhet.training.peak_memory import memory_of_process

CONFIG = decoder_config(width=512, num_layers=12, seq_len=128)
RANK_BATCH_SIZE = 4
NUM_RANKS = 2
NUM_WARMUP_STEPS = 2
NUM_STEPS = 4
BYTES_PER_PARAM = 16  # float32: itself, its gradient and two AdamW moments
STATE_MIB = num_params(CONFIG) * BYTES_PER_PARAM / MIB  # of all ranks together
SYSTEMS = (HET, FSDP2)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """What one rank of one launch had at most."""

    system: str
    launch: int
    rank: int
    level_mib: float  # resident after init_process_group
    peak_mib: float  # above the level, from then on
    steps_peak_mib: float  # above the level, after the first steps
    state_mib: float  # parameters, gradients and moments of the whole model


def measure_memory(rank: int, system_name: str, launch: int) -> MemorySample:
    """Build and train one system in this fresh process."""
    gc.collect()
    level_mib = resident_mib("VmRSS")
    forget_peak()
    system = make_system(system_name)
    tokens = torch.randint(0, CONFIG.vocab_size, (RANK_BATCH_SIZE, CONFIG.seq_len))
    for _ in range(NUM_WARMUP_STEPS):
        system.step(tokens, tokens)
    peak_mib = resident_mib("VmHWM")
    forget_peak()
    for _ in range(NUM_STEPS):
        system.step(tokens, tokens)
    steps_peak_mib = resident_mib("VmHWM")
    return MemorySample(
        system=system_name,
        launch=launch,
        rank=rank,
        level_mib=level_mib,
        peak_mib=max(peak_mib, steps_peak_mib) - level_mib,
        steps_peak_mib=steps_peak_mib - level_mib,
        state_mib=round(STATE_MIB, 1),
    )


def make_system(name: str) -> System:
    """The one of ``SYSTEMS`` called ``name``."""
    if name == FSDP2:
        return fsdp2(CONFIG)
    return het_fsdp(CONFIG, Plan.even(NUM_RANKS, microbatch_size=RANK_BATCH_SIZE))


def resident_mib(key: str) -> float:
    """VmRSS is now, VmHWM the peak."""
    return memory_of_process(key) / MIB
