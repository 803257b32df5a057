"""Random state that depends on what is computed, not on which rank computes it.

Before each microbatch of a unit the generators are seeded from (seed, step, unit, number of
the call, global index of the microbatch's first sample); recomputation in backward gets the
same seed.  One process that runs the plan's microbatches with these seeds draws the same
dropout masks.  A call without batched inputs (dropout of a table of positions) runs once for
all samples and is seeded as if for sample 0.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import blake2b

import torch

from shardhet.comm import devices


def microbatch_seed(seed: int, step: int, unit_fqn: str, call: int, first_sample: int) -> int:
    """The seed of a microbatch, in [0, 2**63).

    ``step`` is the number of finished steps, ``call`` the number of earlier calls of the unit
    in this forward.
    """
    text = f"{seed}/{step}/{unit_fqn}/{call}/{first_sample}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def restored_random_state(device: torch.device) -> AbstractContextManager[None]:
    """A context that restores the generators of the host and of ``device`` at its end."""
    return _restored(_generators(device))


@contextmanager
def _restored(generators: Sequence[torch.Generator]) -> Iterator[None]:
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
    """Seeds a model's computations in training mode, and restores the generators."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._generators = _generators(device)

    def around(self, is_training: bool) -> AbstractContextManager[None]:
        """A context in which the generators may be seeded; it restores them at its end."""
        return _restored(self._generators) if is_training else nullcontext()

    def seed(
        self, unit_fqn: str, call: int, step: int, first_sample: int, is_training: bool
    ) -> None:
        """Seed the generators for a microbatch, if ``is_training``."""
        if is_training:
            seed = microbatch_seed(self._seed, step, unit_fqn, call, first_sample)
            for generator in self._generators:
                generator.manual_seed(seed)


def _generators(device: torch.device) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if not devices.is_on_host(device):
        module = devices.module_of(device)
        index = module.current_device() if device.index is None else device.index
        generators.append(module.default_generators[index])
    return generators
