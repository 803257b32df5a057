"""``shardhet.apps.train`` on a node whose only device has the speed that ``NODE_SPEED`` says.

``cluster.speeds`` names the speeds of a fixed number of ranks; here nodes come and go.
The moment at which the process was ready for its first import is left in ``NODE_STARTED``.
"""

import os
import time
from pathlib import Path

Path(os.environ["NODE_STARTED"]).write_text(str(time.monotonic()), encoding="ascii")

from shardhet.apps.train import main  # noqa: E402
from shardhet.config.training import ClusterConf  # noqa: E402
from shardhet.training.emulation import EmulatedDevice  # noqa: E402


def _emulated_device(_: ClusterConf, rank: int) -> EmulatedDevice:
    return EmulatedDevice(speed=float(os.environ["NODE_SPEED"]))


if __name__ == "__main__":
    ClusterConf.emulated_device = _emulated_device  # type: ignore[method-assign]
    main()
