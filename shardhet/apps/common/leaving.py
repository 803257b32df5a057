"""How a rank ends that was told to, or whose peers were, where the run goes on without them.

torchrun takes status 0 of a rank for the end of the run, and an agent that ends by itself
closes the rendezvous for all others.
"""

import os
import signal

STARTS_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: an agent that may restarts this rank


def leave(reason: str | None) -> None:
    """End this rank; ``reason`` is the notice that it was given itself, None if others were.

    Raises ``SystemExit`` on a rank that is to be started again.  Others end with status 0; an
    agent that has not been told to leave itself is.
    """
    if reason is None:
        raise SystemExit(STARTS_AGAIN)
    if reason != signal.SIGTERM.name:  # which comes from the agent
        os.kill(os.getppid(), signal.SIGTERM)
