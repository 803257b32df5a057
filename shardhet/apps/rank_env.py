"""Which of the launched processes this one is, and the name of the run they all agree on."""

import os
import secrets
import time
from dataclasses import dataclass
from typing import Any, Self

STAMP_KEY = "shardhet/run_stamp"

# Kept open until the process ends: where the first rank hosts the store itself, peers and the
# process group that is made later speak to it.
_stores: list[Any] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnv:
    """What torchrun (or anything that sets its variables) says about this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    store_host: str
    store_port: int
    is_store_hosted_by_agent: bool
    is_restarted: bool

    @classmethod
    def from_environment(cls) -> Self | None:
        """None in a process that nobody launched as a rank."""
        environment = os.environ
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return None
        return cls(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            local_world_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
            store_host=environment.get("MASTER_ADDR", "localhost"),
            store_port=int(environment.get("MASTER_PORT", "0")),
            is_store_hosted_by_agent=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            is_restarted=environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0",
        )


def new_stamp() -> str:
    """A name that sorts by time and that no two runs share."""
    return f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(2)}"


def agree_on_stamp(env: RankEnv | None) -> str:
    """The stamp of the rank that asked first; the same again after a restart.

    Speaks through torchrun's own store, because every rank needs the name of the run folder
    before there is a process group.
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
    # Restarted ranks find the same store and so the same folder.
    return str(store.compare_set(STAMP_KEY, "", new_stamp()).decode())
