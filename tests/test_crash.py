"""Out of many failures, the one that the others follow from."""

from pathlib import Path

import pytest
from rich.console import Console

from shardhet.apps.launch.crash import crash_panel, read_failures, root_cause, save_failure
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.comm.failure import Failure, FailureKind, LostPeerError
from shardhet.comm.peers import failure_of


def failure(rank: int, *, at_s: float, is_consequence: bool = False) -> Failure:
    return Failure(
        kind=FailureKind.LOST if is_consequence else FailureKind.RAISED,
        ranks=(rank,),
        name=f"rank {rank} (cpu)",
        what=f"ValueError: {rank}",
        where="model.py:1",
        at_s=at_s,
    )


def test_the_first_that_is_no_consequence_is_the_cause() -> None:
    said = [
        failure(0, at_s=1.0, is_consequence=True),
        failure(1, at_s=3.0),
        failure(2, at_s=2.0),
    ]
    assert root_cause(said, [failure(3, at_s=0.0)]) == said[2]


def test_a_killed_process_is_the_cause_where_all_others_only_lost_it() -> None:
    said = [failure(rank, at_s=1.0, is_consequence=True) for rank in (0, 2)]
    silent = [failure(0, at_s=0.5), failure(1, at_s=0.6)]  # the launcher saw rank 0 end too
    assert root_cause(said, silent) == silent[1]


def test_without_a_cause_the_first_consequence_is_better_than_nothing() -> None:
    said = [failure(rank, at_s=9.0 - rank, is_consequence=True) for rank in range(3)]
    assert root_cause(said, []) == said[2]
    assert root_cause([], []) is None


def test_a_failure_names_the_line_and_whether_it_follows_from_another(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    try:
        raise ValueError("bad [samples]")
    except ValueError as error:
        cause = failure_of(error, rank=3, name="rank 3 (cpu)")
    try:
        try:
            raise LostPeerError("connection reset")
        except LostPeerError as lost:
            raise RuntimeError("rank 3 failed") from lost
    except RuntimeError as error:
        consequence = failure_of(error, rank=0, name="rank 0 (cpu)")
    assert cause.where.startswith(f"{__file__}:")
    assert (cause.kind, consequence.kind) == (FailureKind.RAISED, FailureKind.LOST)
    for each in (cause, consequence):
        save_failure(each, folder)
    assert read_failures(folder) == [consequence, cause]


@pytest.mark.parametrize("width", [60, 120])
def test_the_panel_shows_rank_error_place_and_log(width: int, tmp_path: Path) -> None:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(crash_panel(failure(2, at_s=0), RunFolder(tmp_path)))
    text = captured.get()
    for part in ("the run failed", "rank  2 (cpu)", "ValueError: 2", "model.py:1"):
        assert part in text
