"""README.md and docs/: links lead to files, code runs, and transcripts are what is printed.

``python -m tests.test_docs`` writes the transcripts anew.
"""

import os
import re
import shlex
import sys
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir

from shardhet import Cluster, HetFSDP, Plan
from shardhet.apps.main import COMMANDS
from shardhet.comm.members import REHEARSE
from shardhet.config.compose import VERSION_BASE, conf_dir, implied_choices
from shardhet.config.measure import register_measure_schemas
from shardhet.config.planning import register_planning_schemas
from shardhet.models.decoder import Decoder, DecoderConfig
from tests.programs import SHARDHET, run
from tests.selection import for_campaign, only
from tests.test_hf_trainer import arguments, as_torchrun_starts
from tests.worlds import TRANSFORMERS, preload, run_ranks

preload(*TRANSFORMERS)

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
MAX_BYTES = {"README.md": 8_000, "docs/architecture.md": 12_000, "docs/planning.md": 12_000}
MAX_BYTES_TOGETHER = 65 * 1024
COLUMNS = 112  # of what is printed outside of tables
WORLD_SIZE = 3
CONFIG_BY_COMMAND = {
    "train": "train",
    "measure": "measure",
    "plan": "planner",
    "simulate": "simulate",
}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SMALL = DecoderConfig(
    vocab_size=64,
    width=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    hidden_width=32,
    seq_len=8,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code of a page."""

    language: str
    text: str
    line: int


def blocks(page: str, language: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [
        Block(match[1], match[2], text.count("\n", 0, match.start()) + 2)
        for match in FENCE.finditer(text)
    ]
    return [block for block in found if block.language == language]


def test_pages_are_short() -> None:
    num_bytes = {page: (ROOT / page).stat().st_size for page in PAGES}
    assert [page for page, most in MAX_BYTES.items() if num_bytes[page] > most] == []
    assert sum(num_bytes.values()) <= MAX_BYTES_TOGETHER


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_that_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    paths = [each for each in targets if "://" not in each]
    assert [each for each in paths if not (ROOT / page).parent.joinpath(each).exists()] == []
    named = re.findall(r"`([\w/]+\.(?:py|csv))`", text)
    files = [f"/{each.relative_to(ROOT)}" for each in ROOT.glob("[a-z]*/**/*.*")]
    assert [each for each in named if not any(file.endswith(f"/{each}") for file in files)] == [
        each for each in named if "NAME" in each
    ]


# Python: the blocks of a page run one after the other, on three ranks


def named_beforehand(page: str) -> dict[str, Any]:
    """What the reader of a page has: a model, data and the like."""
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": page}
    if page == "README.md":
        program = (ROOT / "examples/first_program.py").read_text()
        exec(program.partition("dist.init_process_group")[0], names)
    elif page == "docs/failures.md":
        names["evaluate"] = lambda: None
    elif page == "docs/training_loop.md":
        names["module"] = Decoder(SMALL)
    elif page == "docs/checkpoints.md":
        plan = Plan.by_hand(microbatch_sizes=[2, 1, 0], state_shares=[0.2, 0.5, 0.3])
        names["plan"] = plan
        names["model"] = HetFSDP(Decoder(SMALL), plan)
        names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
        names["scheduler"] = torch.optim.lr_scheduler.ConstantLR(names["optimizer"])
    return names


def of_transformers() -> dict[str, Any]:
    """The same, for transformers' Trainer."""
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    texts = [list(range(i, i + 16)) for i in range(40)]
    return {
        "model": transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=64, **shape)
        ),
        "args": arguments("out", max_steps=1),
        "dataset": [{"input_ids": text, "labels": text} for text in texts],
    }


def _run_python(rank: int, page: str, folder: str) -> None:
    os.chdir(folder)
    if page == "README.md":  # its cards are not here
        os.environ[REHEARSE] = "4090 | 3090x2"
    dist.init_process_group = lambda *args, **options: None  # the ranks of a test have a group
    warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by an old name
    with as_torchrun_starts(rank, dist.get_world_size()):
        names = named_beforehand(page)
        for block in blocks(page, "python"):
            if "HetTrainer" in block.text:
                names.update(of_transformers())
            code = compile("\n" * (block.line - 1) + block.text, ROOT / page, "exec")
            exec(code, names)


@pytest.mark.parametrize(
    "page", only(["README.md"], [page for page in PAGES if blocks(page, "python")])
)
def test_python_runs(page: str, tmp_path: Path) -> None:
    run_ranks(_run_python, WORLD_SIZE, page, str(tmp_path), timeout_s=180.0, fresh_world=True)


def test_the_description_of_cards_is_read(tmp_path: Path) -> None:
    yaml = "".join(block.text for block in blocks("docs/planning.md", "yaml"))
    (tmp_path / "cards.yaml").write_text(yaml)
    cluster = Cluster.load(tmp_path / "cards.yaml")
    assert [each.kind for each in cluster.devices] == ["NVIDIA GeForce RTX 4090"] + [
        "NVIDIA GeForce RTX 3060"
    ] * 2


# The command line: keys exist, and what a command prints is what the page shows


def command_lines(page: str) -> list[str]:
    """Commands of blocks without a language, without comments and line breaks."""
    text = "\n".join(block.text for block in blocks(page, "")).replace("\\\n", " ")
    return [re.sub(r"\s+#\s.*", "", line) for line in text.splitlines()]


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_their_keys_exist(page: str) -> None:
    register_measure_schemas()
    register_planning_schemas()
    targets = (ROOT / "Makefile").read_text()
    for line in command_lines(page):
        words = shlex.split(line) if line.startswith(("make", "shardhet ", "torchrun")) else []
        if not words or words[0] == "shardhet/":
            continue
        if words[0] == "make":
            assert f"\n{words[1]}:" in targets
            continue
        if words[0] == "torchrun":
            programs = [word for word in words if word.endswith(".py")]
            if programs:
                assert all((ROOT / each).exists() for each in programs), line
                continue
            module = words[words.index("-m") + 1]
            assert find_spec(module), line
            words = ["shardhet", module.rsplit(".", 1)[1], *words[words.index(module) + 1 :]]
        assert words[1] in COMMANDS, line
        if words[1] in CONFIG_BY_COMMAND:
            keys = [word for word in words[2:] if "=" in word and not word.endswith(".yaml")]
            implied = implied_choices(keys) if words[1] == "train" else []
            with initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE):
                compose(CONFIG_BY_COMMAND[words[1]], [*keys, *implied])


def transcripts(page: str) -> list[tuple[str, str]]:
    """Commands, each with what the page says that it prints."""
    texts = (block.text.removeprefix("$ shardhet ") for block in blocks(page, "console"))
    return [(command, shown) for command, _, shown in (text.partition("\n") for text in texts)]


def printed(command: str, folder: Path) -> str:
    """What a command prints; lines that are not of tables are wrapped."""
    done = run([*SHARDHET, *shlex.split(command)], folder)
    assert done.returncode == 0, done.stderr
    return "".join(f"{line}\n" for each in done.stdout.splitlines() for line in wrapped(each))


def wrapped(line: str) -> Sequence[str]:
    return [line] if line[:1] in "+|" else textwrap.wrap(line, COLUMNS)


@pytest.mark.parametrize(
    ("page", "command", "shown"),
    [
        (page, *each) if page == "README.md" else for_campaign(page, *each)
        for page in PAGES
        for each in transcripts(page)
    ],
)
def test_transcripts_are_what_is_printed(
    page: str, command: str, shown: str, tmp_path: Path
) -> None:
    assert printed(command, tmp_path) == shown, f"run python -m tests.test_docs: {page}"


def write_transcripts() -> None:
    """Run every command that is shown with what it prints, and write that into the pages."""
    for page in PAGES:
        path = ROOT / page
        for command, shown in transcripts(page):
            sys.stderr.write(f"{page}: shardhet {command}\n")
            before = f"```console\n$ shardhet {command}\n"
            text = path.read_text(encoding="utf-8")
            text = text.replace(before + shown, before + printed(command, ROOT))
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_transcripts()
