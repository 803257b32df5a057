"""The programs of examples/ run as docs/first_program.md tells their reader to."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.programs import SHARDHET, TORCHRUN, run
from tests.selection import for_campaign
from tests.test_docs import blocks
from tests.test_emulated_programs import put_accelerators
from tests.warm import ROOT
from tests.worlds import TRANSFORMERS, preload

preload(*TRANSFORMERS)

EXAMPLES = ROOT / "examples"
CARDS = "4090 | 3090x2"
LOSS = re.compile(r"\bloss'?:? '?([\d.]+)")


def rehearsed(name: str, folder: Path, *arguments: str) -> tuple[str, list[float]]:
    """What the program prints on CPU processes, and the losses in it."""
    program = [f"{EXAMPLES}/{name}.py", "--cards", CARDS, *arguments]
    done = run([*SHARDHET, "rehearse", *program], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, [float(each) for each in LOSS.findall(done.stdout)]


@pytest.mark.parametrize("place", ["rehearse", "accelerators", for_campaign("torchrun")])
def test_the_first_program_trains_on_cpus_and_on_accelerators(
    tmp_path: Path, place: str
) -> None:
    (tmp_path / "program.py").write_text((EXAMPLES / "first_program.py").read_text())
    environment = {}
    if place == "rehearse":
        output, _ = rehearsed("first_program", tmp_path)
    else:
        if place == "accelerators":
            put_accelerators(tmp_path)
        else:
            environment = {"SHARDHET_REHEARSE": CARDS}
        torchrun = [*TORCHRUN, "--nproc-per-node=3", "-m", "program"]
        done = run(torchrun, tmp_path, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        output = done.stdout
    losses = [float(each) for each in LOSS.findall(output)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    kind = "emulated" if place == "accelerators" else "0 NVIDIA GeForce RTX 4090"
    assert kind in output
    weights = torch.load(tmp_path / "model.pt")
    assert weights["0.weight"].shape == (128, 3, 4, 4)


def test_a_rehearsal_of_a_plan_gives_the_program_this_plan(tmp_path: Path) -> None:
    """In place of one that it would make; with another batch it is refused."""
    plan = ["plan", f"cards={CARDS}", "model=small", "what_if_s=0", "global_batch_size=32"]
    assert run([*SHARDHET, *plan, "out=plan.json"], tmp_path).returncode == 0
    document = json.loads((tmp_path / "plan.json").read_text())
    assert len(document["ranks"]) == 3
    program = [f"{EXAMPLES}/first_program.py", "--plan", "plan.json"]
    done = run([*SHARDHET, "rehearse", *program], tmp_path)
    assert done.returncode == 1
    assert "a step has 32 samples, but 64 are asked for" in done.stderr


def test_batches_per_card(tmp_path: Path) -> None:
    _, losses = rehearsed("batch_per_card", tmp_path)
    assert len(losses) == 2
    assert losses[-1] < losses[0]


def test_resuming_goes_on_after_the_last_checkpoint(tmp_path: Path) -> None:
    """Steps after it are those of the run that wrote it."""
    first, _ = rehearsed("resuming", tmp_path)
    again, _ = rehearsed("resuming", tmp_path)
    lines = [each for each in first.splitlines() if each.startswith("epoch")]
    assert lines[-1].startswith("epoch 3 step 16")
    assert [each for each in again.splitlines() if each.startswith("epoch")] == lines[15:]


@pytest.mark.parametrize("options", [("--lora",), for_campaign(())])
def test_fine_tuning_ends_in_a_folder_for_from_pretrained(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    _, losses = rehearsed("fine_tuning", tmp_path, *options)
    assert losses[3] < losses[0]
    kept = "adapter_config.json" if options else "config.json"
    assert (tmp_path / "out/model" / kept).is_file()
    assert (tmp_path / "out/model/tokenizer.json").is_file()


def test_pages_show_lines_of_the_first_program() -> None:
    program = (EXAMPLES / "first_program.py").read_text()
    imports, _, lines = blocks("README.md", "python")[0].text.rpartition("\n\n")
    assert f"\n{lines}" in program
    assert all(f"\n{each}\n" in program for each in imports.splitlines())
    explained = re.findall(r"^- `([^`]+)`", (ROOT / "docs/first_program.md").read_text(), re.M)
    assert len(explained) > 5
    assert [each for each in explained if each not in program] == []
