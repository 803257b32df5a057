"""Which of the launched processes this one is, and the name of the run they all agree on."""

import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

STAMP_KEY = "shardhet/run_stamp"

# The ports where the ranks of an srun step meet unless MASTER_PORT is set: below the ephemeral
# ports of systems, and a different one for each job and step.
FIRST_SRUN_PORT, NUM_SRUN_PORTS = 12_000, 20_000
MAX_STEP_ID_GAP = 7

# Kept open until the process ends: if the first rank hosts the store itself, its peers and the
# later process group use it.
_stores: list[Any] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnv:
    """The rank of this process, from the variables of torchrun (or compatible) or srun."""

    rank: int
    world_size: int
    local_rank: int
    store_host: str
    store_port: int
    is_store_hosted_by_agent: bool = False
    is_restarted: bool = False  # by srun, which says so on all ranks
    is_elastic: bool = False  # the launcher starts ranks again if one fails, or nodes join
    may_start_again: bool = False  # and has not done so too often on this node

    @classmethod
    def from_environment(cls) -> Self | None:
        """Read the environment; None if this process was not launched as a rank."""
        environment = os.environ
        num_restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
        max_restarts = int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        if "RANK" in environment and "WORLD_SIZE" in environment:
            return cls(
                rank=int(environment["RANK"]),
                world_size=int(environment["WORLD_SIZE"]),
                local_rank=int(environment.get("LOCAL_RANK", "0")),
                store_host=environment.get("MASTER_ADDR", "localhost"),
                store_port=int(environment.get("MASTER_PORT", "0")),
                is_store_hosted_by_agent=environment.get("TORCHELASTIC_USE_AGENT_STORE")
                == "True",
                is_elastic=max_restarts > 0,
                may_start_again=num_restarts < max_restarts,
            )
        # A batch script also has the variables of a task, but only srun counts the tasks of
        # a step; a step of one task starts its own ranks.
        if is_task_of_srun():
            return cls._of_srun(environment)
        return None

    @classmethod
    def _of_srun(cls, environment: Mapping[str, str]) -> Self:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
        job = int(environment["SLURM_JOB_ID"])
        step = int(environment.get("SLURM_STEP_ID", "0"))
        port = FIRST_SRUN_PORT + (job * MAX_STEP_ID_GAP + step) % NUM_SRUN_PORTS
        return cls(
            rank=int(environment["SLURM_PROCID"]),
            world_size=int(environment["SLURM_STEP_NUM_TASKS"]),
            local_rank=int(environment["SLURM_LOCALID"]),
            store_host=environment.get("MASTER_ADDR") or first_host(nodes),
            store_port=int(environment.get("MASTER_PORT") or port),
            is_restarted=environment.get("SLURM_RESTART_COUNT", "0") != "0",
        )

    @property
    def may_go_on(self) -> bool:
        """Whether what a run folder has may be of an earlier start of this same run.

        The same on all ranks.  torchrun counts restarts by node, and none if a node joins.
        """
        return self.is_elastic or self.is_restarted

    @property
    def why_not_started_again(self) -> str | None:
        """Why these ranks do not go on if one fails, and what helps; None if they do."""
        if not self.is_elastic:
            return (
                "nobody starts these ranks again. Start them with `shardhet train` alone, or "
                "with torchrun --max-restarts=9."
            )
        if self.is_store_hosted_by_agent:  # at every start the same, with all its keys
            return (
                "ranks that torchrun starts again would look for those that are gone. Set "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node."
            )
        return None

    def publish(self) -> None:
        """Set the variables that torch's ``init_process_group`` reads, as torchrun does."""
        os.environ |= {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.store_host,
            "MASTER_PORT": str(self.store_port),
        }


def is_task_of_srun() -> bool:
    """Whether this process is one of several tasks of a step that srun started."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def first_host(nodes: str) -> str:
    """The first of the hosts in Slurm's short form: gpu07-a in ``gpu[07-09,12]-a,cpu1``."""
    found = re.match(r"(?P<head>[^\[,]*)(?:\[(?P<number>\d+)[^\]]*\](?P<tail>[^,]*))?", nodes)
    assert found is not None  # every part may be empty
    return "".join(part or "" for part in found.groups())


def new_stamp() -> str:
    """A name that sorts by time and that no two runs share."""
    return f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(4)}"


def agree_on_stamp(env: RankEnv | None) -> str:
    """The stamp of the rank that asked first, for all ranks.

    It uses the launcher's store, because every rank needs the name of the run folder before
    there is a process group.
    """
    if env is None or env.world_size == 1:
        return new_stamp()
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        env.store_host,
        env.store_port,
        is_master=env.rank == 0 and not env.is_store_hosted_by_agent,
        wait_for_workers=False,
        multi_tenant=True,
    )
    _stores.append(store)
    return str(store.compare_set(STAMP_KEY, "", new_stamp()).decode())
