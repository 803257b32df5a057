"""What device this is; asked in a process of its own, so that nothing of it stays behind."""

import platform
from dataclasses import dataclass

import torch

from experiments.common.machine import Environment
from experiments.gpu.results import GIB, Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The device and the libraries between it and torch."""

    name: str
    total_bytes: int = 0
    free_bytes: int = 0
    has_bfloat16: bool = True
    cuda: str = "none"
    nccl: str = "none"

    def as_markdown(self, environment: Environment) -> str:
        """One line for a README."""
        return (
            f"{environment.date}, commit `{environment.commit}`; {self.name}, "
            f"{self.total_bytes / GIB:.1f} GiB ({self.free_bytes / GIB:.1f} free); "
            f"{environment.cpu}, {environment.num_cores} cores, load before "
            f"{environment.load_before}; {environment.system}, Python {environment.python}, "
            f"torch {environment.torch}, CUDA {self.cuda}, NCCL {self.nccl}."
        )


def look(device: torch.device, _record: Recorder) -> Machine:
    """Ask the driver; of a CPU in a rehearsal there is nothing to ask."""
    if device.type != "cuda":
        return Machine(name=f"no GPU ({platform.machine()})")
    properties = torch.cuda.get_device_properties(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return Machine(
        name=properties.name,
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        has_bfloat16=properties.major >= 8,  # earlier ones emulate it
        cuda=str(torch.version.cuda),
        nccl=".".join(map(str, torch.cuda.nccl.version())),
    )
