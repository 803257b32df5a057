"""How much memory does it take to read a Hugging Face folder by rows, and to write it again?

python -m experiments.hf_folder.run            a few minutes, 4 GB of disk
python -m experiments.hf_folder.run --quick    a folder of 0.2 GB
"""

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.common.launch import run_ranks
from experiments.common.results import Bar, Page, parser_of
from experiments.common.unlike import MIB
from shardhet import HetFSDP, Plan
from shardhet.hf import load_pretrained, save_pretrained

HERE = Path(__file__).parent
SHARES = (0.5, 0.2, 0.3)
PLAN = Plan.by_hand(microbatch_sizes=[1, 1, 1], state_shares=SHARES)
BY_ROWS, WHOLE = "load_pretrained by plan", "from_pretrained on every rank, then HetFSDP"
SLACK_BYTES = 200 * MIB  # the bar: rows, two units and this
SECONDS_BETWEEN_LOOKS = 0.005
WORDS = torch.arange(1, 9)[None]
HEADER = ["how", "rank", "its rows MiB", "largest unit MiB", "peak MiB", "beyond rows MiB", "s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """What one rank held at most, beyond what its process held before."""

    how: str
    rank: int
    rows_mib: float
    unit_mib: float
    model_mib: float
    peak_mib: float  # private, and shared memory by its part in it
    seconds: float


class Watch:
    """Looks at the process's memory while it is open."""

    def __init__(self) -> None:
        self._before = self._peak = held_bytes()
        self._is_open = True
        self._thread = threading.Thread(target=self._look)
        self._start_s = time.perf_counter()
        self._thread.start()

    def close(self) -> tuple[float, float]:
        """MiB held at most, beyond what was held before; and seconds."""
        self._is_open = False
        self._thread.join()
        return (self._peak - self._before) / MIB, time.perf_counter() - self._start_s

    def _look(self) -> None:
        while self._is_open:
            self._peak = max(self._peak, held_bytes())
            time.sleep(SECONDS_BETWEEN_LOOKS)


def held_bytes() -> int:
    """Anonymous and shared memory, each page shared out among those that map it (proc(5))."""
    names = ("Pss_Anon", "Pss_Shmem")
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(names))


def make_folder(folder: Path, *, width: int, num_layers: int) -> None:
    """A Llama in bfloat16 whose values differ in every row, in files of 250 MB."""
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config)
    model.to_empty(device="cpu")
    noise = torch.randn(2**20 + 7, generator=torch.Generator().manual_seed(0)).bfloat16() / 50
    for fqn, param in model.named_parameters():
        if param.ndim == 1:
            param.data.fill_(1.0)
            continue
        flat = param.data.view(-1)
        for start in range(0, flat.numel(), noise.numel()):
            part = flat[start : start + noise.numel()]
            part.copy_(noise.roll(hash_of(fqn))[: part.numel()])
    model.save_pretrained(folder, max_shard_size="250MB")


def hash_of(text: str) -> int:
    """The same in every process."""
    return sum(ord(letter) * 31**i for i, letter in enumerate(text)) % 2**20


def measure(rank: int, how: str, tiny: str, folder: str, again: str) -> Peak:
    """Load, and save if it was by rows; first a tiny folder, for what libraries hold."""
    take(how, tiny, f"{again}-tiny")
    watch = Watch()
    model = take(how, folder, again)
    peak_mib, seconds = watch.close()
    params = list(model.parameters())
    nbytes = params[0].element_size()
    return Peak(
        how=how,
        rank=rank,
        rows_mib=sum(p.numel() for p in params) * nbytes / MIB,
        unit_mib=max(unit.numel for unit in model.plan.units) * nbytes / MIB,
        model_mib=sum(unit.numel for unit in model.plan.units) * nbytes / MIB,
        peak_mib=peak_mib,
        seconds=seconds,
    )


def take(how: str, folder: str, again: str) -> HetFSDP:
    """The folder's model, sharded; written to ``again`` if that is asked for."""
    if how == WHOLE:
        return HetFSDP(LlamaForCausalLM.from_pretrained(folder), PLAN)
    model = load_pretrained(folder, PLAN)
    save_pretrained(model, again, max_shard_bytes=250 * 10**6)
    return model


def differences(folder: Path, again: Path) -> int:
    """Tensors that differ between two folders, and 1 more if the logits do."""
    found = 0 if torch.equal(logits(folder), logits(again)) else 1
    tensors = tensor_files(again)
    for key, path in tensor_files(folder).items():
        with safe_open(path, "pt") as a, safe_open(tensors.pop(key), "pt") as b:
            found += not torch.equal(a.get_tensor(key), b.get_tensor(key))
    return found + len(tensors)


def logits(folder: Path) -> torch.Tensor:
    """What plain transformers computes."""
    model: Any = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        output: torch.Tensor = model(WORDS).logits
    return output


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def main() -> None:
    """Measure, show, and write the results into README.md."""
    is_quick = parser_of(__doc__, "a small folder; keeps nothing").parse_args().quick
    page = Page(HERE, is_kept=not is_quick)
    with TemporaryDirectory() as place:
        tiny, folder = Path(place) / "tiny", Path(place) / "model"
        again = Path(place) / "again"
        make_folder(tiny, width=64, num_layers=1)
        make_folder(folder, width=1024 if is_quick else 2048, num_layers=4 if is_quick else 8)
        nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        peaks = [
            peak
            for how in (BY_ROWS, WHOLE)
            for peak in run_ranks(measure, 3, how, str(tiny), str(folder), str(again))
        ]
        num_different = differences(folder, again)
    worst = max(p.peak_mib - p.rows_mib - 2 * p.unit_mib for p in peaks if p.how == BY_ROWS)
    bars = [
        Bar(claim="folder, GB", measured=nbytes / 1e9, at_least=1.0),
        Bar(
            claim="peak beyond rows and two units, MiB",
            measured=worst,
            at_most=SLACK_BYTES / MIB,
        ),
        Bar(claim="tensors or logits that differ", measured=num_different, at_most=0),
    ]
    rows = [
        [
            p.how,
            str(p.rank),
            f"{p.rows_mib:.0f}",
            f"{p.unit_mib:.0f}",
            f"{p.peak_mib:.0f}",
            f"{p.peak_mib - p.rows_mib:.0f}",
            f"{p.seconds:.1f}",
        ]
        for p in peaks
    ]
    page.table("Memory of each rank", HEADER, rows)
    page.bars(bars)
    page.keep({"results.csv": peaks})


if __name__ == "__main__":
    main()
