"""Whether torch, as it is installed here, serves this rank's GPU and fits its peers."""

from contextlib import suppress
from pathlib import Path

import torch

from shardhet.comm.channel import Channel, check_same_on_all_ranks
from shardhet.comm.transport import wants_gloo


def check_serves(device: torch.device, *, needs_bfloat16: bool) -> None:
    """Raise ``ValueError`` if this build has no kernels for the GPU, or the GPU no bfloat16."""
    if device.type != "cuda":
        return
    name = torch.cuda.get_device_name(device)
    capability = torch.cuda.get_device_capability(device)
    built_for = torch.cuda.get_arch_list()
    try:
        torch.ones(1, device=device).add_(1)
    except RuntimeError as error:  # no kernel image is available
        raise ValueError(
            f"{name} has compute capability {capability[0]}.{capability[1]}, but torch "
            f"{torch.__version__} has kernels for {', '.join(built_for)} only: "
            f"{str(error).splitlines()[0]}. Install a build of torch for an older CUDA on this "
            "host; the version of torch and of NCCL must stay that of the other ranks."
        ) from None
    if needs_bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(
            f"precision: BF16 but {name} does not compute in bfloat16. Set precision=FP16 "
            "or FP32, or leave this device out."
        )


def check_alike(device: torch.device, channel: Channel) -> None:
    """Raise ``ValueError`` on every rank if ranks cannot communicate.  Collective.

    That is, if versions of torch or NCCL differ, or the makers of GPUs.  Builds for different
    CUDA may be mixed: unlike GPUs can need them.
    """
    versions = {"torch": torch.__version__.partition("+")[0]}
    if device.type == "cuda" and not wants_gloo():
        makers = channel.exchange_objects("ROCm" if torch.version.hip else "CUDA")
        if len(set(makers)) > 1:
            raise ValueError(
                f"torch is built for {', '.join(makers)}, in the order of ranks: NCCL and RCCL "
                "do not understand each other. Set transport=gloo, or leave one kind out."
            )
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    check_same_on_all_ranks(versions, what="versions of torch and NCCL", channel=channel)


def described(device: torch.device) -> str:
    """What a rank is told apart by besides its kind: "compute capability 8.6, GenuineIntel"."""
    names = [processor()]
    if device.type == "cuda" and torch.version.cuda:
        names[:0] = [
            "compute capability {}.{}".format(*torch.cuda.get_device_capability(device)),
            "no bfloat16 of its own"
            * (not torch.cuda.is_bf16_supported(including_emulation=False)),
        ]
    return ", ".join(filter(None, names))


def processor() -> str:
    """The maker of this host's processor, as /proc/cpuinfo has it; "" if that is not known."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next((each.split()[-1] for each in lines if each.startswith("vendor_id")), "")
    return ""
