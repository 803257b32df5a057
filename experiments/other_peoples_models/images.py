"""Do models with images, and models of diffusers, train under plans as one process trains them?

python -m experiments.other_peoples_models.images                  some minutes; writes images.csv
python -m experiments.other_peoples_models.images --quick          one plan; keeps nothing
python -m experiments.other_peoples_models.images --only llava     what has the word in its name

Steps have images in all, in some and in no samples. Norms that transformers computes in float32
whatever the dtype are computed in float64, on both sides. Needs `pip install diffusers`.
"""  # noqa: E501

import copy
import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.common.machine import Environment
from experiments.common.results import console, parser_of, write_csv
from experiments.other_peoples_models.comparison import Errors, copies, quiet, unit_by_param
from experiments.other_peoples_models.forks import run_forks
from experiments.other_peoples_models.image_families import FAMILIES, Pictured, Sample
from experiments.other_peoples_models.ranks import _is_deliberate
from shardhet import HetFSDP, Plan, Stage
from shardhet.fsdp.microbatch.caches import CacheSwitch
from shardhet.fsdp.sharding.wrapping import find_units
from tests.test_model_hf import double_norms

HERE = Path(__file__).parent
BAR, NOISES = 1e-12, 10.0  # of the unit's largest gradient; times what plain torch shows
TIMEOUT_S = 120.0
# Images of each sample of a step, up to the most of a family
STEPS: Sequence[Sequence[int]] = ((1, 2, 1, 2), (0, 2, 1, 0), (0, 0, 0, 0), (2, 1, 1, 1))
PLANS = ("[2, 1]", "[1, 0, 2]", "rounds", "stages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of a family under a plan."""

    family: str
    plan: str
    verdict: str
    error: float  # the largest of losses, gradients and parameters, relative
    noise: float  # of plain torch's gradients: samples one by one, no cache, divided last
    commit: str
    text: str


class Trained(nn.Module):
    """A model with its loss, so that stages can compute it."""

    def __init__(self, family: Pictured) -> None:
        super().__init__()
        self.model = family.make()
        self.config = getattr(self.model, "config", None)
        self._family = family

    def forward(self, **batch: Any) -> tuple[Tensor, int]:
        """The loss of its samples, as a sum, and what it is over."""
        target = batch[self._family.target]
        given = {name: value for name, value in batch.items() if name != "target"}
        return self._family.loss(self.model(**given), target)


def samples_of(family: Pictured, step: int, number: int) -> tuple[list[Sample], bool]:
    """Those of a step, and whether any has an image."""
    torch.manual_seed(20 + step)
    images = [
        max(family.least_images, min(each, family.most_images)) for each in STEPS[step][:number]
    ]
    return [family.sample(each) for each in images], any(images)


def together(
    family: Pictured, samples: Sequence[Sample], example: Sample, *, has_images: bool
) -> dict[str, Tensor]:
    """A batch of these samples, perhaps without any."""
    left_out = () if has_images else family.of_images
    return {
        name: torch.cat([each[name] for each in samples]) if samples else example[name][:0]
        for name in example
        if name not in left_out
    }


def plan_of(name: str, units: Sequence[str]) -> Plan:
    """The plan with this name, for a model with these units."""
    if name == "stages":
        middle = len(units) // 2
        stages = [
            Stage(units=tuple(units[:middle]), num_ranks=1),
            Stage(units=tuple(units[middle:]), num_ranks=2),
        ]
        sizes = [2, 1, 1]
        return Plan.by_hand(
            microbatch_sizes=sizes, rank_batch_sizes=sizes, num_rounds=2, stages=stages
        )
    if name == "rounds":
        return Plan.by_hand(microbatch_sizes=[1, 1], rank_batch_sizes=[2, 1], num_rounds=2)
    return Plan.by_hand(microbatch_sizes=[2, 1] if name == "[2, 1]" else [1, 0, 2])


@double_norms()
def units_of(family: Pictured) -> list[str]:
    """The names of its units under stages, in the order of their first calls; in the middle
    those that are never called, as towers for images of texts alone.
    """
    quiet()
    module, called = Trained(family), list[str]()
    units = find_units(module, None, merges_tied=False)
    for unit in units:
        name = unit.fqns[0]
        unit.modules[0].register_forward_pre_hook(lambda *_, name=name: called.append(name))
    samples, _ = samples_of(family, 0, 2)
    module(**together(family, samples, samples[0], has_images=True))
    order = list(dict.fromkeys(called))
    middle, names = len(order) // 2, [unit.fqns[0] for unit in units]
    return [*order[:middle], *(n for n in names if n not in order), *order[middle:]]


@double_norms()
def run_rank(family: Pictured, plan: Plan) -> dict[str, Any]:
    """How a rank ended; never raises."""
    quiet()
    errors = Errors(unit_by_param={})
    try:
        train(family, plan, errors)
    except BaseException as error:
        if os.environ.get("SHOW"):
            traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        return {"text": text, "is_deliberate": _is_deliberate(error)}
    return {"error": max(errors.by_quantity.values()), "worst": errors.worst}


def train(family: Pictured, plan: Plan, errors: Errors) -> None:
    """Train beside one process; what differs goes to ``errors``."""
    plain = Trained(family)
    errors.unit_by_param = unit_by_param(plain, find_units(plain, None))
    options = {} if family.ragged is None else {"ragged": family.ragged}
    model = HetFSDP(copy.deepcopy(plain), plan, **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (plain, model)]
    for step in range(len(STEPS)):
        samples, has_images = samples_of(family, step, plan.global_batch_size)
        rounds = [plan.round_samples(model.position, i) for i in range(plan.num_rounds)]
        batches = [
            together(family, samples[own.start : own.stop], samples[0], has_images=has_images)
            for own in rounds
        ]
        if plan.stages:
            own = [samples[i] for i in plan.sample_indices(model.position)]
            mine = together(family, own, samples[0], has_images=has_images)
            mean = model.forward_backward(**mine)
        else:
            for batch in batches:
                mean = model.backward(*model(**batch))
        loss, number = plain(**together(family, samples, samples[0], has_images=has_images))
        (loss / number).backward()
        if mean is not None:
            errors.see_number("loss", float(mean), loss.item() / number, f"step {step}")
        rows = {fqn: box.rows for fqn, box in model.sharded_state_dict().items()}
        errors.see_rows("grad", grads_of(model), grads_of(plain), rows, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found = {fqn: box.tensor for fqn, box in model.sharded_state_dict().items()}
        expected = dict(copies(dict(plain.named_parameters())))
        errors.see_rows("state", dict(found), dict(expected), rows, f"after {step}")


def grads_of(model: nn.Module) -> Mapping[str, Tensor | None]:
    """By name; those of rows are plain tensors."""
    return {
        fqn: None if param.grad is None else param.grad.as_subclass(Tensor)
        for fqn, param in model.named_parameters()
    }


@double_norms()
def noise_of(family: Pictured) -> float | str:
    """How exact plain torch is; a text if it does not run."""
    quiet()
    try:
        plain, each, uncached = (Trained(family) for _ in range(3))
        errors = Errors(unit_by_param=unit_by_param(plain, find_units(plain, None)))
        samples, _ = samples_of(family, 0, 4)
        whole = together(family, samples, samples[0], has_images=True)
        loss, number = plain(**whole)
        (loss / number).backward()
        for sample in samples:
            each(**together(family, [sample], sample, has_images=True))[0].backward()
        with CacheSwitch(uncached).off():  # keys then lie otherwise in memory
            uncached(**whole)[0].backward()
        for other in (each, uncached):  # divided at the end, as rounds do
            divided = {n: None if g is None else g / number for n, g in grads_of(other).items()}
            errors.see_rows("grad", divided, grads_of(plain), None, "")
    except Exception as error:
        if os.environ.get("SHOW"):
            traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return errors.by_quantity["grad"]


def run(family: Pictured, plan_name: str, noise: float, commit: str) -> Row:
    """One row."""
    [units] = run_forks(units_of, 1, family, timeout_s=TIMEOUT_S)
    plan = plan_of(plan_name, units)
    reports = run_forks(
        run_rank,
        plan.world_size,
        family,
        plan,
        timeout_s=TIMEOUT_S,
        stays=lambda r: "error" in r,
    )
    failed = [each for each in reports if each is not None and "text" in each]
    error, text = float("nan"), ""
    if None in reports:
        verdict, text = "crashed", "; ".join(each["text"] for each in failed) or "hung or died"
    elif failed:
        is_refused = len(failed) == len(reports) and all(r["is_deliberate"] for r in failed)
        verdict, text = (
            "refused" if is_refused else "crashed",
            min((each["text"] for each in failed), key=len),
        )
    else:
        worst = max(reports, key=lambda each: each["error"])
        error = worst["error"]
        is_exact = error <= max(BAR, NOISES * noise)
        verdict, text = ("exact", "") if is_exact else ("wrong", worst["worst"])
    return Row(
        family=family.name,
        plan=plan_name,
        verdict=verdict,
        error=error,
        noise=noise,
        commit=commit,
        text=text.replace("\n", " "),
    )


def main() -> None:
    """Run what is asked for, print, and keep."""
    parser = parser_of(__doc__, "one plan; keeps nothing")
    parser.add_argument("--only", action="append", metavar="WORD", help="of family names")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a fork of a process with threads may hang
    environment = Environment.here()
    console.print(environment.as_markdown())
    wanted = [word.lower() for word in options.only or [""]]
    rows: list[Row] = []
    for family in FAMILIES:
        if not any(word in family.name.lower() for word in wanted):
            continue
        family.make()  # imports, before forks
        [noise] = run_forks(noise_of, 1, family, timeout_s=TIMEOUT_S)
        if not isinstance(noise, float):
            console.print(f"{family.name}: plain torch: {noise}", markup=False)
            continue
        for plan_name in PLANS[:1] if options.quick else PLANS:
            rows.append(run(family, plan_name, noise, environment.commit))
            row = rows[-1]
            line = (
                f"{row.family:16} {row.plan:10} {row.verdict:8} {row.error:.0e} {row.noise:.0e}"
            )
            console.print(f"{line} {row.text}", markup=False, soft_wrap=True)
            if not options.quick and not options.only:
                write_csv(HERE / "images.csv", rows)


if __name__ == "__main__":
    main()
