"""Some families of experiments/other_peoples_models as it runs them, in one process tree."""

import csv
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.selection import one_in
from tests.warm import warm_python
from tests.worlds import TRANSFORMERS, patience, preload

preload(*TRANSFORMERS)

REPOSITORY = Path(__file__).parent.parent
PROGRAM = "experiments.other_peoples_models.run"
FEW = {  # family: way of calling; all with three ranks, one without samples
    "GPT-2": "labels",
    "nn.LSTM": "collision",
}
OTHERS = {
    "Mixtral": "logits",
    "ViT": "lora",
    "Qwen3": "logits",
    "Gemma3": "collision",
    "BERT": "evaluation",
    "ALBERT": "loss_fn",
    "T5": "logits",
    "ResNet": "logits",
    "Whisper": "labels",
}

STAGED = ("GPT-2",)
OTHERS_STAGED = ("ViT", "Llama, tied", "BERT")

TIMEOUT_S = 280  # half a minute on a quiet machine
pytestmark = [
    pytest.mark.skipif(
        find_spec("transformers") is None or find_spec("peft") is None,
        reason="needs transformers and peft: pip install transformers peft",
    ),
]


@pytest.mark.parametrize("cases", one_in(2, [FEW, OTHERS]), ids=["few", "others"])
def test_steps_are_those_of_one_process(cases: dict[str, str], tmp_path: Path) -> None:
    named = [f"{family}/{way}" for family, way in cases.items()]
    rows = _rows(tmp_path, "--case", *named)
    assert {row["family"] for row in rows} == cases.keys()


@pytest.mark.campaign  # without stages they stay
@pytest.mark.parametrize(
    "families", one_in(2, [[*STAGED], [*OTHERS_STAGED]]), ids=["few", "others"]
)
def test_steps_in_stages_are_those_of_one_process(families: list[str], tmp_path: Path) -> None:
    named = [f"{family}/stages" for family in families]
    rows = _rows(tmp_path, "--stages", "--case", *named)
    assert {row["family"] for row in rows} == {*families}


def _rows(folder: Path, *options: str) -> list[dict[str, str]]:
    """What the experiment writes of cases, all of which have to be exact."""
    path = folder / "results.csv"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [warm_python(), "-m", PROGRAM, "--quick", "--results", path, *options],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S * patience(),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert row["verdict"] == "exact", f"{row['family']}, {row['way']}: {row['text']}"
    return rows
