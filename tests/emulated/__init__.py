"""An accelerator and NCCL, emulated on the CPU by their rules, and a detector of races.

    with Accelerator().installed() as accelerator:
        model = HetFSDP(module, plan, device=accelerator.device)   # as on a GPU
        ...
    accelerator.syncs          # where the host waited for the device

``clocks`` has streams and events, ``memory`` what a storage was used for and when it may be
used again, ``accelerator`` the device, ``nccl`` the communicators, ``device_thread`` where
backward runs.
"""
