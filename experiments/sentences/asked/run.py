"""Plans random clusters, and asks every sentence of the report of the command itself.

A seed draws hosts, cards, links by name, a model and what is asked.  ``shardhet plan`` reports
with ``explain=true baselines=true``; then each row of "What would help" is planned for with its
key or its change, and so is each sentence that names devices, a key or a number.

python -m experiments.sentences.asked.run
python -m experiments.sentences.asked.run --seeds 0 4 --only-show   # writes nothing
"""

import io
import json
import random
import re
import tempfile
import time
from collections import Counter
from contextlib import chdir
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.common import by_seed
from experiments.common.results import markdown_table
from shardhet.apps.cli.streamed import Spinner
from shardhet.apps.plan import SPEC
from shardhet.apps.planning.answering import show
from shardhet.apps.planning.inputs import composed, read_request
from shardhet.apps.planning.what_if import WhatIfQuery, forms, that_fit
from shardhet.config.compose import to_checked
from shardhet.config.models import HfConf, LoraConf
from shardhet.config.planning import Inputs, PlannedPrecision, PlannerConf
from shardhet.planner import PlanError
from shardhet.planner.advice.explain import Situation, at_other_speed, larger_situations
from shardhet.planner.problem.constraints import TOLERANCE
from shardhet.pricing.cost import CostModel
from shardhet.pricing.scenario import Scenario
from shardhet.records.cluster import Cluster
from shardhet.records.kinds import UNSUPPORTED, built_in_kinds
from shardhet.records.plan import Plan
from shardhet.records.workload import Workload

HERE = Path(__file__).parent
NUM_CASES = 200
FALSE = 3e-3  # a rate that is so far from what was said is false
ROUNDED = 7e-4  # of rates that are printed in four digits
WHOLE_S = 1e9  # for trying what would help: everything is tried
HF = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 8192, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip
FOLDER = Path(tempfile.gettempdir(), "shardhet-sentences", "llama")
MODELS = ("tiny", "gpt_125m", "llama_1b", "gpt_1_3b", "llama_3b", "llama_7b")
LINKS = ("PCIe 3 x4", "PCIe 3 x16", "PCIe 4 x8", "PCIe 4 x16", "PCIe 5 x16", "NVLink 3")
NETWORKS = ("1 GbE", "10 GbE", "25 GbE", "100 GbE", "InfiniBand EDR", "InfiniBand HDR")
KINDS = [
    name
    for name in built_in_kinds()
    if not any(re.search(rf"\b({each})\b", name, re.IGNORECASE) for each in UNSUPPORTED)
]
SENTENCES = (
    "what would help",
    "what limits",
    "better without",
    "at other speeds",
    "one round",
    "tolerance",
    "has a plan",
    "does not fit",
    "stages",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A cluster, and what was false of what the command said."""

    seed: int
    devices: int
    nodes: int
    model: str
    batch: int
    keys: str
    result: str  # plan, stages or none
    asked: str  # sentences by sort
    wrong: str
    cpu_s: float


@dataclass
class Lora(HfConf):
    """A Hugging Face model that is counted once."""

    def to_workload(
        self, *, param_dtype: str, vocab_size: int | None = None, seq_len: int | None = None
    ) -> Workload:
        return _counted(self.lora.rank, seq_len, param_dtype)


@cache
def _counted(rank: int, seq_len: int | None, param_dtype: str) -> Workload:
    lora = LoraConf(rank=rank, targets=["q_proj", "v_proj"] if rank else [])
    conf = HfConf(path=str(FOLDER), weights=False, lora=lora)
    return conf.to_workload(param_dtype=param_dtype, seq_len=seq_len)


@cache
def _model(name: str) -> Any:
    if name == "hf":
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / "config.json").write_text(json.dumps(HF))
        return Lora(path=str(FOLDER), weights=False)
    request = read_request(SPEC, [f"model={name}", "cards=4090"])
    assert request is not None
    return to_checked(composed(SPEC, request)[0], PlannerConf).model


def drawn(seed: int) -> tuple[PlannerConf, str, Cluster]:
    """What is asked, of which model and cluster."""
    rng = random.Random(seed)
    kinds = rng.sample(KINDS, rng.choice((1, 2, 2, 3)))
    has_hosts_memory = rng.random() < 0.3
    nodes = []
    for i in range(rng.choice((1, 2, 2, 3, 4))):
        node: dict[str, Any] = {"host": f"host{i}", "link": rng.choice(LINKS)}
        most = rng.choice((1, 1, 1, 2) if i else (1, 1, 2, 3))
        numbers = Counter(rng.choice(kinds) for _ in range(most))
        node["devices"] = [{"kind": kind, "count": n} for kind, n in numbers.items()]
        if has_hosts_memory:
            node["host_memory_bytes"] = f"{rng.choice((16, 64, 256))} GiB"
        nodes.append(node)
    document = {"version": 1, "nodes": nodes, "between_nodes": rng.choice(NETWORKS)}
    cluster = Cluster.from_document(document, source="drawn")
    name = rng.choice((*MODELS, "hf"))
    model = _model(name)
    if name == "hf" and rng.random() < 0.6:
        model = replace(model, lora=LoraConf(rank=8, targets=["q_proj", "v_proj"]))
    is_small = model.usual_seq_len < 512 if hasattr(model, "usual_seq_len") else False
    conf = PlannerConf(
        model=model,
        seq_len=None if is_small else rng.choice((256, 512, 1024, 2048)),
        global_batch_size=rng.choice((2, 4, 6, 8, 12, 16, 24, 32)),
        max_rounds=rng.choice((None, None, 1)),
        tolerance=rng.choice((0.005, 0.005, 0.0)),
        max_stages=(max_stages := rng.choice((1, 1, 1, 1, 2, 3))),
        leave_out="auto" if max_stages == 1 and rng.random() < 0.15 else "ask",
        inputs_on_host=has_hosts_memory and rng.random() < 0.4,
        optimizer_on_host=has_hosts_memory and rng.random() < 0.4,
        explain=True,
        baselines=True,
        what_if_s=WHOLE_S,
    )
    return conf, name, cluster


@dataclass(frozen=True)
class Said:
    """What the command prints; ``rate`` is None where nothing fits."""

    text: str

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def rate(self) -> float | None:
        """Samples per second of the plan that is shown last."""
        found = re.findall(r"^predicted step .*?: ([\d.,e+-]+) samples/s", self.text, re.M)
        return float(found[-1].replace(",", "")) if found else None

    @property
    def has_stages(self) -> bool:
        return "shardhet train plan=file runs plans with stages" in self.text


class Judge:
    """Asks of one cluster."""

    def __init__(self, conf: PlannerConf, name: str, cluster: Cluster) -> None:
        self.conf, self.name, self.cluster = conf, name, cluster
        self.inputs = conf.derived(cluster, name)
        self.quiet = replace(conf, explain=False, baselines=False, what_if_s=0)
        self.asked: Counter[str] = Counter()
        self.wrong: list[str] = []

    def said(self, conf: PlannerConf, inputs: Inputs) -> Said:
        """What ``shardhet plan`` prints."""
        to = Console(file=io.StringIO(), width=400, highlight=False)
        waiting = Spinner(to)
        demands = conf.to_constraints(inputs.scenario.cluster.devices)
        try:
            show(conf, inputs, demands, to, waiting)
        except PlanError as error:
            alone, of_alone = conf.without_stages(inputs)
            lines = [str(error)]
            if conf.explain:
                asked = WhatIfQuery(conf=alone, inputs=of_alone, constraints=demands, best=None)
                lines += that_fit(asked)
            to.print("\n".join(lines), markup=False, soft_wrap=True)
        assert isinstance(to.file, io.StringIO)
        return Said(to.file.getvalue())

    def rate(self, cluster: Cluster | None = None, **changes: Any) -> float | None:
        """What the command reaches on another cluster or with other keys."""
        conf = replace(self.quiet, **changes)
        inputs = conf.derived(cluster or self.cluster, self.name)
        return self.said(conf, inputs).rate

    def rate_in(self, scenario: Scenario, **changes: Any) -> float | None:
        """Likewise with other times."""
        conf = replace(self.quiet, leave_out="never", **changes)
        return self.said(conf, Inputs(scenario=scenario, name=self.name)).rate

    def is_so(self, sort: str, is_true: bool, told: str) -> None:
        """One more sentence was asked."""
        self.asked[sort] += 1
        if not is_true:
            self.wrong.append(f"{sort}: {told}")

    def judge(self) -> str:
        """Ask everything; returns what the result was."""
        said = self.said(self.conf, self.inputs)
        if said.rate is None:
            self._of_refusal(said)
            return "none"
        if said.has_stages:
            self._of_stages(said)
            return "stages"
        better = [line for line in said.lines if line.startswith("Better without")]
        if better:  # what follows is of another cluster
            self._of_better(better[0], said.rate)
            return "fewer"
        self._of_rows(said)
        self._of_limits(said)
        self._of_rounds(said)
        self._of_speeds(said)
        if self.conf.max_stages > 1:
            rate = self.rate(max_stages=1)
            self.is_so("stages", _near(rate, said.rate), f"none faster: {rate} {said.rate}")
        if found := re.search(r"^The fastest plan takes ([\d.]+)% less", said.text, re.M):
            rate = self.rate(tolerance=0.0, max_stages=1)
            claimed = said.rate * (1 + float(found[1]) / 100)
            self.is_so("tolerance", _near(rate, claimed), f"{found[0]}: {rate} {said.rate}")
        return "plan"

    # What would help

    def _of_rows(self, said: Said) -> None:
        title = said.lines.index("What would help")
        self.gains: dict[str, float] = {}
        for line in said.lines[title + 4 :]:
            if not line.startswith("|"):
                break
            of, change, rate, _ = (cell.strip() for cell in line.strip("|").split("|"))
            reached = self._reached(of, change) or 0.0
            assert said.rate is not None
            claimed = said.rate if rate == "-" else float(rate.replace(",", ""))
            found = max(reached, said.rate)  # with less, nothing is changed
            self.gains[f"{of} {change}"] = found / said.rate - 1
            told = f"{of}, {change}: said {rate}, is {reached:.4g} (now {said.rate:.4g})"
            self.is_so("what would help", _at_most(claimed, found), told)
            if note := next((e for e in said.lines if e.startswith(f"{change}: without ")), ""):
                told = f"Better {note.partition(': ')[2]}: {rate} samples/s"
                self._of_better(told, said.rate)

    def _reached(self, of: str, change: str) -> float | None:
        if "=" in change:
            return self._with_keys(change)
        alone, inputs = self.conf.without_stages(self.inputs)
        if change == "one more":
            larger = self._with_one_more(of)
            return None if larger is None else self.rate(larger, max_stages=1)
        here = Situation(
            scenario=inputs.scenario, constraints=alone.to_constraints(self.cluster.devices)
        )
        for resource, kind, named, more in larger_situations(here):
            what = f"all {resource.value}" if kind is None else f"{resource.value} of {kind}"
            if (what, named) == (of, change):
                return self.rate_in(more.scenario, max_stages=1)
        raise AssertionError(change)

    def _with_keys(self, keys: str) -> float | None:
        changes: dict[str, Any] = {}
        cluster = self.cluster
        if keys.startswith("more memory of hosts"):
            nodes = (replace(node, host_memory_bytes=None) for node in cluster.nodes)
            cluster = replace(cluster, nodes=tuple(nodes))
            keys = keys.partition("with ")[2].strip(", ")
        for each in keys.split():
            key, _, value = each.partition("=")
            if key == "precision":
                changes[key] = PlannedPrecision[value]
            elif key == "model.lora.rank":
                lora = LoraConf(rank=int(value), targets=["q_proj", "v_proj"])
                changes["model"] = replace(self.conf.model, lora=lora)
            elif not key.startswith("model."):
                changes[key] = {"true": True, "auto": "auto"}.get(value) or int(value)
        changes.setdefault("max_stages", 1)
        return self.rate(cluster, **changes)

    def _with_one_more(self, kind: str) -> Cluster | None:
        nodes = list(self.cluster.nodes)
        n = max(n for n, e in enumerate(nodes) if any(d.kind == kind for d in e.devices))
        i = max(i for i, device in enumerate(nodes[n].devices) if device.kind == kind)
        devices = nodes[n].devices
        nodes[n] = replace(nodes[n], devices=(*devices[: i + 1], *devices[i:]))
        return replace(self.cluster, nodes=tuple(nodes))

    # What limits it

    def _of_limits(self, said: Said) -> None:
        tenths = {
            name: self.gains[f"all {name} {change}"]
            for name, change in (
                ("compute", "10 % faster"),
                ("memory", "10 % more"),
                ("links", "10 % faster"),
            )
            if f"all {name} {change}" in self.gains
        }
        most = max(tenths.values())
        for line in said.lines:
            if line.startswith("A tenth more compute"):
                self.is_so("what limits", most <= FALSE + ROUNDED, f"{line} {tenths}")
            elif found := re.match(r"What limits it: (compute|memory|links)", line):
                is_most = tenths[found[1]] >= most - FALSE
                self.is_so("what limits", is_most, f"{line} {tenths}")
            elif found := re.match(
                r"With 8 times as much memory it would gain ([\d.]+)%", line
            ):
                gain = self.gains["all memory 8 times as much"]
                is_gain = abs(gain - float(found[1]) / 100) <= FALSE * (1 + gain) + 5e-3
                self.is_so("what limits", is_gain, f"{line} {gain:.2%}")

    # Rounds

    def _of_rounds(self, said: Said) -> None:
        for line in said.lines:
            if line.startswith("| one round"):
                cell = line.strip("|").split("|")[2].strip()
                rate = self.rate(max_rounds=1, max_stages=1, tolerance=0.0)
                is_so = (
                    rate is None if cell == "-" else _near(rate, float(cell.replace(",", "")))
                )
                self.is_so("one round", is_so, f"{line}: {rate}")

    # Other speeds

    def _of_speeds(self, said: Said) -> None:
        for line in said.lines:
            found = re.match(r"With each kind's speed 20% off, (.*)", line)
            if not found:
                continue
            plan = Plan.load(Path(".shardhet", "first.json"))
            if len(plan.ranks) < self.cluster.world_size:
                return
            alone, inputs = self.conf.without_stages(self.inputs)
            here = Situation(
                scenario=inputs.scenario, constraints=alone.to_constraints(self.cluster.devices)
            )
            worst = 0.0
            for kind in dict.fromkeys(str(each.kind) for each in self.cluster.devices):
                for speed in (0.8, 1.2):
                    scenario = at_other_speed(here, frozenset({kind}), speed).scenario
                    step_s = CostModel(scenario).predict(plan).step_time_s
                    best = self.rate_in(scenario, max_stages=1, tolerance=0.0)
                    assert best is not None
                    worst = max(worst, best * step_s / self.conf.global_batch_size - 1)
            number = re.search(r"at most ([\d.]+)%", line)
            claimed = float(number[1]) / 100 if number else 0.0
            told = f"{line[40:]}: {worst:.2%}"
            self.is_so("at other speeds", worst <= claimed + FALSE + 1e-3, told)  # at most

    # Nothing fits

    def _of_refusal(self, said: Said) -> None:
        told = {}
        for line in said.lines:
            if found := re.match(r"(.*) has a plan: ([\d.,e+-]+) samples/s", line):
                told[found[1]] = float(found[2].replace(",", ""))
        if lower := re.search(r"Lower global_batch_size to ([\d,]+)", said.text):
            batch = int(lower[1].replace(",", ""))
            rate = self.rate(global_batch_size=batch)
            self.is_so("does not fit", rate is not None, f"batch of {batch}: {rate}")
        alone, of_alone = self.conf.without_stages(self.inputs)
        demands = alone.to_constraints(self.cluster.devices)
        asked = WhatIfQuery(conf=alone, inputs=of_alone, constraints=demands, best=None)
        for each in forms(asked):
            rate = self._with_keys(each.change)
            claimed = told.get(each.change)
            is_so = rate is None if claimed is None else _near(rate, claimed)
            self.is_so("has a plan", is_so, f"{each.change}: said {claimed}, is {rate}")

    # Stages

    def _of_stages(self, said: Said) -> None:
        rate = said.rate
        assert rate is not None
        flat = self.rate(max_stages=1)
        faster = [flat or 0.0]
        for line in said.lines:
            times = re.search(r", ([\d.]+) times as long", line)
            if line.startswith("Without stages"):
                is_so = flat is None if times is None else _near_ratio(rate, flat, times[1])
                self.is_so("stages", is_so, f"{line} {flat}")
            elif line.startswith("Only ") and times:
                only = self.rate(self.cluster.only(_positions(line)), max_stages=1)
                self.is_so("stages", _near_ratio(rate, only, times[1]), f"{line} {only}")
            elif line.startswith("Better without"):
                self._of_better(line, rate)
            elif found := re.search(r"is predicted to be more than (\d+)% faster", line):
                most = rate * (1 + int(found[1]) / 100)
                self.is_so("stages", max(faster) <= most * (1 + FALSE), f"{line} {faster}")

    def _of_better(self, line: str, rate_of_all: float) -> None:
        found = re.match(r"Better without (.*): (?:they would|([\d.,e+-]+) samples/s)", line)
        assert found is not None
        left = set(_positions(found[1]))
        kept = [i for i in range(self.cluster.world_size) if i not in left]
        rate = self.rate(self.cluster.only(kept), max_stages=1, leave_out="never")
        claimed = float(found[2].replace(",", "")) if found[2] else rate_of_all
        self.is_so("better without", _near(rate, claimed), f"{line} {rate}")


def _positions(text: str) -> list[int]:
    """Devices in ``the 2 Tesla T4 (devices 0, 2-3), 1 ... (device 5)``."""
    found: list[int] = []
    for listed in re.findall(r"\(devices? ([\d, -]+)\)", text):
        for run in listed.split(", "):
            first, _, last = run.partition("-")
            found += range(int(first), int(last or first) + 1)
    return found


def _near(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= (FALSE + ROUNDED) * min(one, other)


def _at_most(claimed: float, reached: float) -> bool:
    """Whether so much is reached, of equally fast plans by the one that is preferred."""
    return claimed <= reached * (1 + TOLERANCE + FALSE + ROUNDED)


def _near_ratio(rate: float, other: float | None, times: str) -> bool:
    return other is not None and abs(rate / other - float(times)) <= 5e-3 + FALSE * float(times)


def judged(seed: int) -> Row:
    """The command about one cluster, and what of it is false."""
    begin_s = time.process_time()
    conf, name, cluster = drawn(seed)
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path(".shardhet").mkdir()
        judge = Judge(replace(conf, out=None), name, cluster)
        judge.conf = replace(conf, out=".shardhet/first.json")
        result = judge.judge()
    lora = conf.model.lora.rank if isinstance(conf.model, HfConf) else 0
    keys = {
        "lora": lora,
        "max_stages": conf.max_stages > 1 and conf.max_stages,
        "inputs": conf.inputs_on_host,
        "optimizer": conf.optimizer_on_host,
        "host_memory": cluster.nodes[0].host_memory_bytes is not None,
        "tolerance=0": not conf.tolerance,
        "one_round": conf.max_rounds == 1,
    }
    return Row(
        seed=seed,
        devices=cluster.world_size,
        nodes=len(cluster.nodes),
        model=name,
        batch=conf.global_batch_size,
        keys=" ".join(key for key, is_set in keys.items() if is_set),
        result=result,
        asked=" ".join(f"{key.replace(' ', '_')}:{n}" for key, n in judge.asked.items()),
        wrong=" // ".join(judge.wrong),
        cpu_s=time.process_time() - begin_s,
    )


def told(row: Row) -> str:
    """One case, in a line."""
    what = f"{row.devices} {row.model} {row.batch} {row.keys} {row.result} {row.cpu_s:.1f} s"
    return f"{row.seed:>4} {what}: {row.wrong or 'true'}"


def as_markdown(rows: list[Row]) -> str:
    """How many sentences were asked and how many are false, by sorts."""
    lines = []
    for sort in (*SENTENCES, "all"):
        numbers = [
            int(n)
            for row in rows
            for key, _, n in (each.partition(":") for each in row.asked.split())
            if sort in (key.replace("_", " "), "all")
        ]
        false = [
            each
            for row in rows
            for each in row.wrong.split(" // ")
            if each and (sort == "all" or each.startswith(f"{sort}:"))
        ]
        lines.append([sort, str(sum(numbers)), str(len(false))])
    return markdown_table(["sentences", "asked", "false"], lines)


if __name__ == "__main__":
    by_seed.run(HERE, Row, judged, as_markdown, range(NUM_CASES), doc=__doc__, told=told)
