"""Manifests with other values, signed anew: are they refused, or harmless?

python -m experiments.recovery.manifests.run                 400 mutations, about a minute
python -m experiments.recovery.manifests.run --seeds 0 20    some of them; keeps nothing
"""

import hashlib
import json
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from experiments.common.results import Bar, Page, parser_of
from shardhet import HetFSDP, Plan
from shardhet.checkpoint import CheckpointError, load, save
from shardhet.checkpoint.format.reading import SavedCheckpoint
from shardhet.checkpoint.summary import summary_of

HERE = Path(__file__).parent
NUM_MUTATIONS = 400
STEP = 3
MANIFEST = "manifest.json"
ELSEWHERE = "elsewhere"  # beside the checkpoint's folder: whole copies of its files
REFUSED, HARMLESS = "refused", "harmless"
DEEP = "[" * 300 + "]" * 300
VALUES: tuple[Any, ...] = (
    *(None, True, -1, -7, 0, 2**70, 10**400, 1.5, float("nan"), float("inf")),
    *("", "x", "3", "../../x", [], [1], {}, {"x": 1}, {"": None}, json.loads(DEEP)),
)
NAMES = ("", ".", "..", "a/b", "x\0y", "\udc80", "e" * 300, "/dev/zero", "/proc/self/mem")
EXTRAS: tuple[Any, ...] = (
    *({"$tensor": each} for each in (5, None, [], {}, "x", "model.weight", "../../x")),
    *({kind: each} for kind in ("$dict", "$counter", "$tuple") for each in (7, "x", None, [1])),
    *({kind: [[[1], 2]]} for kind in ("$dict", "$counter")),
    {"$dict": [[1, 2, 3]]},
    {"$counter": [["a", "b"]]},
    {"$dict": [[{"$tensor": "extra.0"}, 1]]},
    {"$tuple": [{"$tensor": "extra.9"}]},
)
HEADER = ["what was changed", "mutations", "refused", "harmless", "wrong"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a mutation."""

    seed: int
    kind: str
    change: str
    verdict: str  # "refused", "harmless", or what went wrong
    num_outside: int  # files outside the folder that were opened

    @property
    def is_well(self) -> bool:
        """Whether it was refused or harmless."""
        return self.verdict in (REFUSED, HARMLESS) and not self.num_outside


class Audit:
    """Files of a folder that this process opens, but for those of one folder in it."""

    def __init__(self) -> None:
        self._root = self._inside = ""
        self.outside: list[str] = []
        sys.addaudithook(self._note)  # for ever: Python removes none

    @contextmanager
    def of(self, root: Path, inside: Path) -> Iterator[None]:
        """Note what is opened in ``root``, or on a device, and not in ``inside``."""
        self.outside.clear()
        self._root, self._inside = str(root), str(inside)
        try:
            yield
        finally:
            self._root = ""

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or not self._root or not isinstance(args[0], (str, bytes)):
            return
        path = args[0] if isinstance(args[0], str) else args[0].decode(errors="replace")
        real = str(Path(path).absolute())
        parts: list[str] = []
        for part in real.split("/"):  # without looking at the disk
            parts = parts[:-1] if part == ".." else [*parts, part]
        real = "/".join(parts)
        is_watched = real.startswith((self._root, "/dev/zero", "/proc/self/mem"))
        if is_watched and not f"{real}/".startswith(f"{self._inside}/"):
            self.outside.append(path)


class Net(nn.Module):
    """Has a parameter of each shape that matters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        """The sum of the outputs, and the number of samples."""
        return self.linear(x).sum() * self.scale, len(x)


def trained() -> tuple[HetFSDP, torch.optim.Optimizer]:
    """A model of one rank, and an optimizer with state."""
    model = HetFSDP(Net(), Plan.even(1, microbatch_size=1))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(STEP):
        model.backward(*model(torch.randn(1, 3)))
        optimizer.step()
    return model, optimizer


def values_of(model: HetFSDP, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All of their tensors."""
    states = [each for state in optimizer.state.values() for each in state.values()]
    return [each.detach().clone() for each in (*model.parameters(), *states)]


def mutate(seed: int, folder: Path) -> tuple[str, str]:
    """Change the manifest and sign it; what kind of change, and which."""
    rng = random.Random(seed)
    path = folder / MANIFEST
    document = json.loads(path.read_text())
    del document["digest"]
    kind = ("field", "file name", "file facts", "extra", "missing")[seed % 5]
    name = rng.choice(sorted(set(document) - {"format", "version"}))
    if kind == "field":
        change = f"{name}={_shown(value := rng.choice(VALUES))}"
        document[name] = value
    elif kind == "extra":
        change = _shown(value := rng.choice(EXTRAS))
        document["extra"] = rng.choice([value, [value], {"a": {"b": value}}])
    elif kind == "missing":
        change = name
        del document[name]
    else:
        file = rng.choice(sorted(document["files"]))
        facts = document["files"].pop(file)
        if kind == "file name":
            beside = str(folder.parent / ELSEWHERE / file)
            elsewhere = [f"../{ELSEWHERE}/{file}", f"./{file}", beside, f"x/../{file}"]
            other = rng.choice([*elsewhere, *NAMES])
            change = f"{file} -> {other!r}"
            document["files"][other] = facts
            if rng.random() < 0.5:  # in addition
                document["files"][file] = facts
        else:
            field, value = rng.choice(sorted(facts)), rng.choice(VALUES)
            change = f"{file} {field}={_shown(value)}"
            document["files"][file] = rng.choice([{**facts, field: value}, value])
    text = json.dumps(document, indent=1) + "\n"
    signed = {**document, "digest": f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"}
    path.write_text(json.dumps(signed, indent=1) + "\n")
    return kind, change


def _shown(value: Any) -> str:
    return repr(value)[:60]


def try_out(seed: int, whole: Path, audit: Audit) -> Outcome:
    """Load a mutated copy of the checkpoint ``whole``."""
    with TemporaryDirectory() as name:
        root = Path(name)
        folder = root / "checkpoint"
        shutil.copytree(whole, folder)
        shutil.copytree(whole, root / ELSEWHERE)
        kind, change = mutate(seed, folder)
        model, optimizer = trained()
        with audit.of(root, folder):
            verdict = _verdict(kind, change, folder, model, optimizer)
        num_outside = len(audit.outside)
    return Outcome(
        seed=seed, kind=kind, change=change, verdict=verdict, num_outside=num_outside
    )


def _verdict(
    kind: str, change: str, folder: Path, model: HetFSDP, optimizer: torch.optim.Optimizer
) -> str:
    before = values_of(model, optimizer)
    with torch.no_grad():
        for param in model.parameters():
            param += 1.0
    model.step = 17
    untouched = values_of(model, optimizer)
    try:
        manifest = summary_of(SavedCheckpoint.open(folder)).manifest
        extra = load(model, optimizer, folder)
    except CheckpointError:
        is_untouched = _are_equal(values_of(model, optimizer), untouched) and model.step == 17
        return REFUSED if is_untouched else "refused, but the model was changed"
    except BaseException as error:
        return f"a raw {type(error).__name__}: {error}"[:120]
    if not _are_equal(values_of(model, optimizer), before):
        return "other values were loaded"
    is_other_extra = kind == "extra" or change.startswith("extra=")
    if not is_other_extra and not torch.equal(extra["a"], torch.arange(3)):
        return "another extra was loaded"
    is_other_step = change.startswith("step=")
    if model.step != (0 if is_other_step else STEP):  # of those only null and 0 are steps
        return f"step {model.step!r} was loaded"
    if manifest is None or manifest.world_size not in range(1, 2**63):
        return f"a manifest without sense: {manifest}"[:120]
    return HARMLESS


def _are_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def make_whole(folder: Path) -> Path:
    """The checkpoint that is mutated."""
    model, optimizer = trained()
    save(model, optimizer, folder, extra={"a": torch.arange(3), "b": ("c", {1: 2})})
    return folder


def report(outcomes: Sequence[Outcome], page: Page) -> None:
    """The tables of a campaign."""
    rows = []
    for kind in sorted({each.kind for each in outcomes}):
        of_kind = [each for each in outcomes if each.kind == kind]
        counts = [sum(e.verdict == each for e in of_kind) for each in (REFUSED, HARMLESS)]
        num_wrong = sum(not each.is_well for each in of_kind)
        rows.append([kind, *map(str, (len(of_kind), *counts, num_wrong))])
    page.table("manifests", HEADER, rows)
    for each in outcomes:
        if not each.is_well:
            page.tell(f"{each}")
    wrong, outside = (
        sum(each.verdict not in (REFUSED, HARMLESS) for each in outcomes),
        sum(each.num_outside for each in outcomes),
    )
    page.bars(
        [
            Bar(claim="neither refused nor harmless", measured=wrong, at_most=0),
            Bar(claim="files opened outside of the folder", measured=outside, at_most=0),
        ]
    )


def main() -> None:
    """Run what the command line says."""
    parser = parser_of(__doc__, "twenty of them; keeps nothing")
    parser.add_argument("--seeds", nargs=2, type=int, metavar=("FIRST", "STOP"))
    options = parser.parse_args()
    first, stop = options.seeds or (0, 20 if options.quick else NUM_MUTATIONS)
    page = Page(HERE, is_kept=options.seeds is None and not options.quick)
    audit = Audit()
    with TemporaryDirectory() as name:
        whole = make_whole(Path(name) / "whole")
        outcomes = [try_out(seed, whole, audit) for seed in range(first, stop)]
    report(outcomes, page)
    page.keep({"results.csv": outcomes})


if __name__ == "__main__":
    main()
