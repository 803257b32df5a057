"""A watch over all ranks, which ends the run when one of them stands still.

Every rank calls ``watch_ranks`` after ``init_process_group``.  Code that takes long on one rank
while others wait for it, and in which nothing is wrong, goes into ``with phase("..."):``.
"""

from shardhet.comm.liveness.ending import EXIT_STATUS
from shardhet.comm.liveness.judging import Verdict
from shardhet.comm.liveness.watch import HANG_TIMEOUT_S, Watch, watch_ranks
from shardhet.comm.progress import phase

__all__ = ["EXIT_STATUS", "HANG_TIMEOUT_S", "Verdict", "Watch", "phase", "watch_ranks"]
