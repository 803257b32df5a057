"""One rank of ``shardhet doctor``: checks that ranks connect, their links, and a step."""

import math
import socket
from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardhet import HetFSDP, Plan
from shardhet.apps.cli.streamed import say
from shardhet.apps.launch.builds import described
from shardhet.apps.launch.crash import RankConsole
from shardhet.apps.launch.joining import choose_device, joined, run_as_rank
from shardhet.apps.launch.rank_env import RankEnv
from shardhet.apps.launch.run_folder import RunFolder, versions
from shardhet.comm import devices
from shardhet.comm.channel import Channel, check_same_on_all_ranks
from shardhet.comm.members import local_device_spec
from shardhet.config.training import ClusterConf
from shardhet.profiler.traffic import Channels, PairSamples, Traffic
from shardhet.records.workload import Workload
from shardhet.training.optim import OptimizerSpec

NUM_REPEATS = 5
GIB = 2**30
# Others may use this part of a GPU's memory, or a GiB: the driver and a desktop take less.
OTHERS_PART_OF_GPU = 0.1
HANG_TIMEOUT_S = 60.0  # nothing here takes as long; ten times that before the first step
WIDTH, NUM_BLOCKS, SAMPLES_PER_RANK = 64, 3, 2
MAX_REPORTED_GB_S = 1e3
TOLERANCE = 1e-4  # on float32 losses whose samples are summed in another order
NUM_STEPS = 3


def main() -> None:
    """Check as one of the ranks that were launched for the folder."""
    run_as_rank(check_as_rank)


def check_as_rank(folder: RunFolder, env: RankEnv) -> None:
    """Run this rank's part of the checks; the first rank prints."""
    taken = taken_here(env)  # before this process takes more
    with joined(ClusterConf(), folder, env, hang_timeout_s=HANG_TIMEOUT_S) as device:
        console = RankConsole(quiet=env.rank != 0, soft_wrap=True)
        _check_hosts(console, env, device)
        say(console, *Channel.of_world().exchange_objects(taken))
        if env.world_size > 1:
            _check_links(console, device)
        else:
            console.print("one rank has no links to measure")
        _check_step(env, device)
        console.print(
            f"{NUM_STEPS} steps of a small model with uneven batches and shards have the "
            "losses of one process"
        )


def taken_here(env: RankEnv) -> str | None:
    """A note if others use much of the memory of this rank's GPU."""
    if not torch.cuda.is_available():
        return None
    try:
        device = choose_device(ClusterConf(), env)
        free_bytes, nbytes = torch.cuda.mem_get_info(device)
    except (RuntimeError, ValueError):  # which joining the others reports
        return None
    taken_bytes = nbytes - free_bytes
    if taken_bytes <= max(GIB, OTHERS_PART_OF_GPU * nbytes):
        return None
    usable_gib = math.floor(9 * free_bytes / GIB) / 10
    limit = f"limits.{env.rank}.memory_gib={usable_gib}"
    less = f", or plan for less: shardhet plan {limit}" if usable_gib >= 1 else ""
    return (
        f"Note: {taken_bytes / GIB:.1f} of {nbytes / GIB:.1f} GiB of {device} of "
        f"{socket.gethostname()} are taken. Stop the processes on it{less}."
    )


def _check_hosts(console: RankConsole, env: RankEnv, device: torch.device) -> None:
    """Print the hosts of all ranks; raise if their versions differ.  Collective."""
    everyone = Channel.of_world()
    spec = local_device_spec(device)
    come = Counter(everyone.exchange_objects((spec.host, spec.kind, described(device))))
    ranks = "1 rank" if env.world_size == 1 else f"{env.world_size} ranks"
    console.print(f"{ranks} met over {dist.get_backend()}")
    for (host, kind, more), number in come.items():
        console.print(f"  {host}: {number} x {', '.join(filter(None, (kind, more)))}")
    check_same_on_all_ranks(versions(), what="versions of packages", channel=everyone)


def _check_links(console: RankConsole, device: torch.device) -> None:
    """Print how fast each rank reaches the next.  Collective."""
    group = dist.group.WORLD
    assert group is not None
    channels = Channels.meet(group, device, local_device_spec(device))
    if devices.is_on_host(device):
        is_shared = channels.gather.transport is not None
        console.print(
            "they read each other's memory"
            if is_shared
            else "they cannot read each other's memory, so bytes go through sockets: slower"
        )
    workload = Workload.transformer(
        num_layers=1, width=WIDTH, num_heads=1, vocab_size=WIDTH, seq_len=1
    )
    with channels.peers.fail_together("measuring links"):
        traffic = Traffic(channels, workload, device, orig_dtype=torch.float32)
        following = [(i, (i + 1) % group.size()) for i in range(group.size())]
        pairs = [traffic.pair(a, b, NUM_REPEATS) for a, b in following]
        hosts = channels.control.exchange_objects(local_device_spec(device).host)
    for name, is_within in (("within a host", True), ("between hosts", False)):
        alike = [p for p in pairs if (hosts[p.sender] == hosts[p.receiver]) is is_within]
        if alike:
            console.print(f"links {name}: {_described(alike)}")


def _described(pairs: list[PairSamples]) -> str:
    slowest = min(pairs, key=lambda pair: pair.bandwidth_bytes_per_s)
    fastest_gb_s = max(pair.bandwidth_bytes_per_s for pair in pairs) / 1e9
    latency_us = max(pair.latency_s for pair in pairs) * 1e6
    slowest_gb_s = slowest.bandwidth_bytes_per_s / 1e9
    # A few MiB cannot resolve higher bandwidths: launching takes longer than sending.
    upper = f"{fastest_gb_s:.2f}" if fastest_gb_s < MAX_REPORTED_GB_S else "too fast to tell"
    return (
        f"{slowest_gb_s:.2f} (from rank {slowest.sender} to {slowest.receiver}) to {upper} "
        f"GB/s, latency {latency_us:.0f} us at most"
    )


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(NUM_BLOCKS)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The summed loss of ``x`` [samples, WIDTH] and the number of summed values."""
        y = x
        for block in self.blocks:
            y = block(y)
        return (y - x).square().sum(), torch.tensor(x.numel(), device=x.device)


def _check_step(env: RankEnv, device: torch.device) -> None:
    """Raise ``RuntimeError`` if the losses of HetFSDP are not those of one process."""
    plan = _uneven_plan(env.world_size)
    generator = torch.Generator().manual_seed(1)
    samples = torch.randn(plan.global_batch_size, WIDTH, generator=generator).to(device)
    first = sum(rank.rank_batch_size for rank in plan.ranks[: env.rank])
    own = samples[first : first + plan.ranks[env.rank].rank_batch_size]
    alone, module = _model(device), _model(device)
    model = HetFSDP(module, plan)
    optimizers = [
        OptimizerSpec(learning_rate=1e-2).build(list(each.parameters()))
        for each in (alone, model)
    ]
    for step in range(NUM_STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_sum, num_tokens = alone(samples)
        loss = loss_sum / num_tokens
        loss.backward()
        found = model.backward(*model(own))
        for optimizer in optimizers:
            optimizer.step()
        expected = loss.item()
        if found is None or not abs(found / expected - 1) <= TOLERANCE:
            raise RuntimeError(
                f"step {step}: HetFSDP's loss is {found}, that of one process {expected}. "
                "Something between the ranks changes numbers: please report it with what "
                "shardhet doctor printed."
            )


def _model(device: torch.device) -> _Model:
    torch.manual_seed(0)
    return _Model().to(device)


def _uneven_plan(world_size: int) -> Plan:
    """A plan with which rank i computes and stores in proportion to i + 1."""
    speeds = range(1, world_size + 1)
    return Plan.by_hand(
        microbatch_sizes=[SAMPLES_PER_RANK] * world_size,
        num_microbatches=list(speeds),
        state_shares=[speed / sum(speeds) for speed in speeds],
    )


if __name__ == "__main__":
    main()
