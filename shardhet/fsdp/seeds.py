"""Random state that depends on what is computed, not on who computes it.

Before each microbatch of a unit the generators are seeded from (seed, step, unit, which call
of it, the global index of the microbatch's first sample); recomputation in backward gets the
same seed.  One process that runs the plan's microbatches with these seeds draws the same
dropout masks.  A call that no sample goes into (dropout of a table of positions) is made once
for all of them, and seeded as if for the first.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import blake2b

import torch


def microbatch_seed(seed: int, step: int, unit_fqn: str, call: int, first_sample: int) -> int:
    """What the generators get before a microbatch; in [0, 2**63).

    ``step`` counts optimizer steps finished before, ``call`` how often the unit was entered
    before in this forward.
    """
    text = f"{seed}/{step}/{unit_fqn}/{call}/{first_sample}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@contextmanager
def restored_random_state(device: torch.device) -> Iterator[None]:
    """The generators of the host and of ``device`` are afterwards as they were before."""
    generators = _generators(device)
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the generators of the host and of ``device``."""
    for generator in _generators(device):
        generator.manual_seed(seed)


class RandomStates:
    """Seeds what a model computes in training mode, and leaves the generators as they were."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device

    def around(self, is_training: bool) -> AbstractContextManager[None]:
        """Inside, the generators may be seeded at will."""
        return restored_random_state(self._device) if is_training else nullcontext()

    def seed(
        self, unit_fqn: str, call: int, step: int, first_sample: int, is_training: bool
    ) -> None:
        """Get ready for a microbatch."""
        if is_training:
            seed = microbatch_seed(self._seed, step, unit_fqn, call, first_sample)
            seed_generators(self._device, seed)


def _generators(device: torch.device) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators
