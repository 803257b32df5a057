"""How a run ends early, and how a rank ends if the others continue without its node.

torchrun takes status 0 of a rank for the end of the run, and an agent that ends by itself
closes the rendezvous for all others.
"""

import os
import signal
from dataclasses import dataclass

from shardhet import HetFSDP
from shardhet.apps.launch.rank_env import RankEnv
from shardhet.training.hooks.hooks import StopOnSignal

FROM_AGENTS = (signal.SIGTERM.name, signal.SIGINT.name)  # which they pass on and end
STARTS_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: an agent that may restarts this rank


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How the training has ended; the same on all ranks."""

    asked_by: tuple[str, ...] = ()  # the ranks that were given notice, and how
    goes_on: bool = False  # without the nodes of these ranks


def agree_on_end(
    model: HetFSDP, notice: StopOnSignal, env: RankEnv, *, is_complete: bool
) -> End:
    """What becomes of the run.  Collective.

    It goes on if some ranks were not told to end, and all of these may be started again.
    """
    mine = (env.rank, notice.reason, notice.ends_run(), env.may_start_again)
    rows: list[tuple[int, str | None, bool, bool]] = sorted(model.exchange_objects(mine))
    others_may = [may_start for _, reason, _, may_start in rows if reason is None]
    asked_by = tuple(f"rank {rank}: {reason}" for rank, reason, _, _ in rows if reason)
    ends_run = any(each for _, _, each, _ in rows)
    goes_on = bool(asked_by and others_may) and all(others_may)
    return End(asked_by=asked_by, goes_on=goes_on and not ends_run and not is_complete)


def leave(reason: str | None) -> None:
    """End this rank; ``reason`` is the notice that it was given itself, None if others were.

    Raises ``SystemExit`` on a rank that is to be started again.  Other ranks end with status 0.
    If the agent itself got no notice, it is ended, too.
    """
    if reason is None:
        raise SystemExit(STARTS_AGAIN)
    if reason not in FROM_AGENTS:
        end_agent()


def end_agent() -> None:
    """End the agent that has started this rank, and would start it again."""
    os.kill(os.getppid(), signal.SIGTERM)
