"""Where the files of ``conf/`` are, and the clusters that are described there."""

from pathlib import Path


def conf_dir() -> Path:
    """The folder ``conf/``, inside the installed package or next to it in a checkout."""
    package_dir = Path(__file__).parent.parent
    installed = package_dir / "conf"
    return installed if installed.is_dir() else package_dir.parent / "conf"


def described_cluster(name: str | Path) -> str | Path:
    """The path of the cluster that is described under this name; else the name as it is."""
    path = conf_dir() / "cluster" / "described" / f"{name}.yaml"
    return path if path.is_file() else name
