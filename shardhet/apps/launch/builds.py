"""Whether torch, as it is installed here, serves this rank's GPU and fits its peers."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from shardhet.comm.calls import wants_gloo
from shardhet.comm.channel import Channel, check_same_on_all_ranks


def check_serves(device: torch.device, *, needs_bfloat16: bool) -> None:
    """Raise ``ValueError`` if this build has no kernels for the GPU, or the GPU no bfloat16."""
    if device.type != "cuda":
        return
    name = torch.cuda.get_device_name(device)
    capability = torch.cuda.get_device_capability(device)
    built_for = torch.cuda.get_arch_list()
    if torch.version.cuda and not has_kernels(capability, built_for):
        raise ValueError(
            f"{name} has compute capability {capability[0]}.{capability[1]}, but torch "
            f"{torch.__version__} has kernels for {', '.join(built_for)} only. Install a build "
            "of torch for an older CUDA, which still serves it, on this host; the version of "
            "torch and of NCCL must stay that of the other ranks."
        )
    if needs_bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(
            f"precision: BF16 but {name} does not compute in bfloat16. Set precision=FP16 "
            "or FP32, or leave this device out."
        )


def has_kernels(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Whether code built for these architectures runs on a GPU of this compute capability.

    ``sm_86`` runs on 8.6 and later of the same major version; ``compute_86`` is translated by
    the driver for anything later (CUDA C++ Programming Guide, "Binary Compatibility" and "PTX
    Compatibility").
    """
    for each in built_for:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", each)
        if found is None:
            continue
        kind, major, minor, only = found.groups()
        built = (int(major), int(minor))
        if only:  # for this one alone
            if capability == built:
                return True
        elif built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return False


def check_alike(device: torch.device, channel: Channel) -> list[str]:
    """Raise ``ValueError`` on every rank if ranks cannot communicate.  Collective.

    That is, if versions of torch or NCCL differ, or the makers of GPUs.  Builds for different
    CUDA may be mixed: unlike GPUs can need them.  Returns what is known of such ranks.
    """
    versions = {"torch": torch.__version__.partition("+")[0]}
    has_nccl = device.type == "cuda" and not wants_gloo()
    if has_nccl:
        made_for = "ROCm" if torch.version.hip else "CUDA"
        capability = torch.cuda.get_device_capability(device)
        found = channel.exchange_objects((made_for, capability, processor()))
        makers, capabilities, processors = zip(*found, strict=True)
        if len(set(makers)) > 1:
            raise ValueError(
                f"torch is built for {', '.join(makers)}, in the order of ranks: NCCL and RCCL "
                "do not understand each other. Set transport=gloo, or leave one kind out."
            )
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    check_same_on_all_ranks(versions, what="versions of torch and NCCL", channel=channel)
    return known_troubles(capabilities, processors) if has_nccl else []


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


def known_troubles(
    capabilities: Sequence[tuple[int, int]], processors: Sequence[str]
) -> list[str]:
    """What others have met with NCCL on such a mixture of ranks, and what to try."""
    found = []
    if len(set(capabilities)) > 1 and min(capabilities) < (9, 0):
        found.append(
            "Compute capabilities differ and one is below 9.0: NCCL leaves its LL128 protocol "
            "out, so collectives of medium size are slower. Measure here, not on one kind."
        )
    if {(7, 0), (8, 0)} <= set(capabilities):
        found.append(
            "V100 and A100 are mixed: NCCL has hung there (github.com/NVIDIA/nccl/issues/794). "
            "If the start does not end, set NCCL_DEBUG=INFO, and leave one of the kinds out."
        )
    if len(set(processors) - {""}) > 1:
        found.append(
            f"Processors differ ({', '.join(sorted(set(processors) - {''}))}): NCCL has hung "
            "there (github.com/NVIDIA/nccl/issues/1136). Set NCCL_NET_OVERHEAD to one value on "
            "all hosts."
        )
    return found
