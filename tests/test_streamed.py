"""What ``shardhet plan`` shows at once, what follows, and what it says while one waits."""

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from shardhet.apps.cli.streamed import Spinner
from shardhet.apps.plan import main
from shardhet.apps.planning import answering


def test_waiting_is_told_on_a_terminal_only() -> None:
    for is_terminal in (True, False):
        out = io.StringIO()
        with Spinner(Console(file=out, force_terminal=is_terminal)).for_("planning"):
            time.sleep(0.2)
        assert ("planning ..." in out.getvalue()) == is_terminal


def test_the_plan_is_shown_and_written_before_anything_else_is_planned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(answering, "forms", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(["cluster=rtx4090_2x3090", "model=gpt_125m", f"out={tmp_path}/plan.json"])
    assert "predicted step" in capsys.readouterr().out
    assert (tmp_path / "plan.json").is_file()
