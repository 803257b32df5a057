"""Some families of experiments/other_peoples_models as it runs them, in one process tree."""

import csv
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PROGRAM = "experiments.other_peoples_models.run"
CASES = {  # family: way of calling; all with three ranks, one without samples
    "Qwen3": "logits",
    "GPT-2": "labels",
    "Gemma3": "collision",
    "Mixtral": "logits",
    "BERT": "evaluation",
    "ALBERT": "loss_fn",
    "T5": "logits",
    "ViT": "lora",
    "ResNet": "logits",
    "Whisper": "labels",
    "nn.LSTM": "collision",
}

TIMEOUT_S = 280  # half a minute on a quiet machine
pytestmark = [
    pytest.mark.timeout(TIMEOUT_S + 20),
    pytest.mark.skipif(
        find_spec("transformers") is None or find_spec("peft") is None,
        reason="needs transformers and peft: pip install transformers peft",
    ),
]


@pytest.fixture(scope="module")
def row_by_family(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What the experiment writes; one program, which imports transformers once."""
    path = tmp_path_factory.mktemp("families") / "results.csv"
    cases = [f"{family}/{way}" for family, way in CASES.items()]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", PROGRAM, "--quick", "--results", path, "--case", *cases],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with path.open(newline="") as file:
        return {row["family"]: row for row in csv.DictReader(file)}


@pytest.mark.parametrize("family", CASES)
def test_a_step_is_the_step_of_one_process(
    row_by_family: dict[str, dict[str, str]], family: str
) -> None:
    row = row_by_family[family]
    assert row["verdict"] == "exact", f"{row['way']}: {row['verdict']}: {row['text']}"
