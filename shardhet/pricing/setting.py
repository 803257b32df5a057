"""What every price is of: this cluster, this workload, these measurements."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shardhet.records.cluster import Cluster
from shardhet.records.profiles import Profile
from shardhet.records.workload import Workload

CLUSTER_FILE, WORKLOAD_FILE, PROFILE_FILE = "cluster.json", "workload.json", "profile.json"


@dataclass(frozen=True, slots=True)
class Setting:
    """Where what is trained, and how fast and large it was measured (or derived) to be."""

    cluster: Cluster
    workload: Workload
    profile: Profile

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """From the three files of a folder that ``shardhet measure`` has written.

        Raises ``ValueError`` and ``OSError`` as their own ``load`` do.
        """
        path = Path(folder)
        return cls(
            Cluster.load(path / CLUSTER_FILE),
            Workload.load(path / WORKLOAD_FILE),
            Profile.load(path / PROFILE_FILE),
        )

    def save(self, folder: str | Path) -> None:
        """Write the three files; the folder is made where there is none."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self.cluster.save(path / CLUSTER_FILE)
        self.workload.save(path / WORKLOAD_FILE)
        self.profile.save(path / PROFILE_FILE)
