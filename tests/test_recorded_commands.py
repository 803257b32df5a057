"""What commands print, write and refuse is what was recorded."""

import pytest

from tests.recorded_commands import FOLDER, played, sessions
from tests.selection import for_campaign

SESSIONS = {
    f"{path.stem}: {title}": text
    for path in sorted(FOLDER.glob("*.txt"))
    for title, text in sessions(path).items()
}


@pytest.mark.parametrize(
    "title", [for_campaign(each) if "(campaign)" in each else each for each in SESSIONS]
)
def test_what_is_printed_is_what_was_recorded(title: str) -> None:
    """``python -m tests.recorded_commands`` writes it anew."""
    assert played(SESSIONS[title]) == SESSIONS[title]
