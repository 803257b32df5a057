"""``shardhet.apps.train`` on a node whose only device has the speed that ``NODE_SPEED`` says.

``cluster.speeds`` names the speeds of a fixed number of ranks; here nodes come and go.
"""

import os

from shardhet.apps.train import main
from shardhet.config.training import ClusterConf
from shardhet.training.emulation import EmulatedDevice


def _emulated_device(_: ClusterConf, rank: int) -> EmulatedDevice:
    return EmulatedDevice(speed=float(os.environ["NODE_SPEED"]))


if __name__ == "__main__":
    ClusterConf.emulated_device = _emulated_device  # type: ignore[method-assign]
    main()
