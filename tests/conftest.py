"""Settings that every test shares; nothing here imports torch."""

import tests.unfrozen  # noqa: F401, I001 -- before all others

import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests.selection import sample
from tests.warm import share
from tests.worlds import preload_tests

# Workers of pytest-xdist are given a narrow one; what programs print is as wide as in a file.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("COLUMNS", None)

# Tests compute little: threads of OpenMP would spin on the cores of other tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline: machines are shared and slow. The same examples in every run: a failure
# that CI shows is a failure that a reader can have again.
settings.register_profile("shardhet", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("shardhet")


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist start their programs from one server."""
    is_controller = "PYTEST_XDIST_WORKER" not in os.environ
    if is_controller and getattr(config.option, "numprocesses", None):
        share()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m alone``, files without that mark are not imported: ten seconds less."""
    is_test = collection_path.name.startswith("test_") and collection_path.is_file()
    if config.option.markexpr != "alone" or not is_test:
        return None
    return "mark.alone" not in collection_path.read_text(encoding="utf-8") or None


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a function that is ``sampled``, what its sample lacks is for the campaign."""
    cases_by_function: dict[str, list[pytest.Function]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if isinstance(item, pytest.Function) and "sampled" in marks and "campaign" not in marks:
            name = f"{item.path}::{item.originalname}"
            cases_by_function.setdefault(name, []).append(item)
    for cases in cases_by_function.values():
        kept = sample([case.callspec.params for case in cases])
        most = cases[0].get_closest_marker("sampled")
        if most is not None and most.args:
            kept = kept[: most.args[0]]
        for i, case in enumerate(cases):
            if i not in kept:
                case.add_marker("campaign")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Ranks are forks of a server, which imports what was collected once for all of them."""
    files = {item.path for item in session.items}
    preload_tests(sorted(f"{__package__}.{path.stem}" for path in files))
    import tests.frozen  # noqa: F401 -- for what it does
