"""Check that requested output files can be written, before any work is done."""

from pathlib import Path

from shardhet.config.checks import ConfigError, check_can_be_folder, check_takes_files


def check_outputs(**path_by_key: str | None) -> None:
    """Raise ConfigError if a file could not be written; ``picture`` is the key of a drawing."""
    for key, path in path_by_key.items():
        if path is not None and not Path(path).resolve().parent.is_dir():
            raise ConfigError(
                f"{key}: the folder of {path!r} does not exist. Create it, or pass another."
            )
        if path is not None and (not path or Path(path).is_dir()):
            raise ConfigError(f"{key}: {path!r} is not a file name. Give one: {key}=plan.json.")
        if path is not None and not Path(path).exists():
            check_takes_files(key, path, Path(path).resolve().parent)
    picture = path_by_key.get("picture")
    if picture is not None:
        _check_picture(picture)


def check_folder_output(key: str, path: str | None) -> None:
    """Raise ConfigError if ``path`` cannot become a folder."""
    if path == "":
        raise ConfigError(f"{key}: '' is not a folder. Pass the path of a folder.")
    if path is not None:
        check_can_be_folder(key, path)


def _check_picture(path: str) -> None:
    try:
        import matplotlib  # noqa: F401 -- only to see whether it is here
    except ImportError:
        raise ConfigError(
            "picture: matplotlib is not installed. Run pip install 'shardhet[plots]'."
        ) from None
    if Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"picture: {path!r} must end in .png, .svg or .pdf.")
