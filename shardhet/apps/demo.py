"""Train one small model on four unlike devices, and show who computes and who stores what.

    python -m shardhet.apps.demo                         starts its own ranks
    python -m shardhet.apps.demo --even                  an even plan: the same losses
    torchrun --nproc-per-node=4 -m shardhet.apps.demo    the same program under torchrun

The four devices are processes on this machine's CPU: the plan treats them as unlike, but
nothing is slowed down or capped.  The text is the interpreter's own standard library, so
nothing is downloaded, and nothing is written without ``--out``.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardhet import DeviceSpec, HetFSDP, Plan
from shardhet.apps.demo_report import (
    EMULATED,
    Reporter,
    StepMetrics,
    WorkDone,
    plan_table,
    work_table,
)
from shardhet.data import (
    VOCAB_SIZE,
    Corpus,
    GlobalBatches,
    PySource,
    TokenBatch,
    deal,
    held_out_windows,
    table_scores,
)
from shardhet.fsdp.observer import Activity, Event
from shardhet.layout import Span
from shardhet.models.decoder import Decoder, DecoderConfig, num_params

MODULE = "shardhet.apps.demo"  # which is __main__ where it runs
MODEL = DecoderConfig(
    vocab_size=VOCAB_SIZE,
    width=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    hidden_width=320,
    seq_len=64,
)
PEAK_LR = 4e-3
WARMUP_FRACTION = 0.25  # of all steps; shorter ones learned more slowly
FINAL_LR_FRACTION = 0.05
STATE_TENSORS = 4  # per parameter: itself, its gradient and two AdamW moments


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """How long to train and how often to look."""

    num_steps: int
    steps_per_line: int
    num_evaluations: int  # after the one before the first step
    num_judged_batches: int  # global batches of held-out text in each evaluation
    is_even: bool
    seed: int
    out_dir: Path | None


DEVICES = tuple(DeviceSpec(kind=EMULATED + k) for k in ("big", "cramped", "slow", "store"))


def uneven_plan() -> Plan:
    """Compute and memory that have nothing to do with each other.

    The device with hardly any memory computes a third and recomputes its activations; the
    one that stores most computes nothing.
    """
    return Plan.by_hand(
        devices=DEVICES,
        microbatch_sizes=[8, 4, 2, 0],
        num_microbatches=[3, 3, 2, 0],
        state_shares=[0.30, 0.05, 0.25, 0.40],
        recompute=[False, True, False, False],
    )


def even_plan() -> Plan:
    """The same global batch, dealt out as if the devices were alike."""
    return Plan.by_hand(devices=DEVICES, microbatch_sizes=[10] * 4, state_shares=[0.25] * 4)


@record
def main(argv: Sequence[str] | None = None) -> None:
    """Start four ranks; or, started as one of them, train."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = parse_options(arguments)
    if dist.is_torchelastic_launched():
        run_rank(options)
    else:
        start_ranks(arguments)


def parse_options(arguments: Sequence[str]) -> DemoOptions:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description="Train a small model on four unlike (emulated) devices, on this CPU.",
    )
    parser.add_argument("--steps", type=int, help="optimizer steps (default: 320, quick: 16)")
    parser.add_argument("--quick", action="store_true", help="only a few seconds of training")
    parser.add_argument(
        "--even", action="store_true", help="deal evenly instead: the losses stay the same"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights and batches (default: 0)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write metrics.jsonl and plan.json there"
    )
    given = parser.parse_args(arguments)
    num_steps = given.steps if given.steps is not None else 16 if given.quick else 320
    if num_steps < 1:
        parser.error(f"--steps: {num_steps} but at least 1 is needed")
    return DemoOptions(
        num_steps=num_steps,
        steps_per_line=min(20, max(1, num_steps // 4)),
        num_evaluations=1 if given.quick else min(4, num_steps),
        num_judged_batches=3 if given.quick else 20,
        is_even=given.even,
        seed=given.seed,
        out_dir=given.out,
    )


def start_ranks(arguments: Sequence[str]) -> None:
    """Run this module once per device of the plan and wait; raise SystemExit if one fails."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before a rank imports torch
    with tempfile.TemporaryDirectory() as log_dir:  # of the launcher; the ranks print
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=len(DEVICES),
            run_id=str(uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=log_dir),
        )
        try:
            elastic_launch(config, sys.executable)("-m", MODULE, *arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            # From a rank that raised, the launcher hands on the error and its traceback.
            cause = failure.message
            raise SystemExit(
                f"demo: rank {rank} failed first, with exit code {failure.exitcode}: "
                f"{cause['message'] if isinstance(cause, dict) else cause}"
            ) from None


def run_rank(options: DemoOptions) -> None:
    """This process's part of the whole run.  Collective."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    reporter = Reporter(
        num_steps=options.num_steps,
        steps_per_line=options.steps_per_line,
        out_dir=options.out_dir,
        is_rank_zero=dist.get_rank() == 0,
    )
    plan = even_plan() if options.is_even else uneven_plan()
    # HetFSDP refuses more ranks than devices, and says so.
    device = DEVICES[dist.get_rank() % len(DEVICES)]
    run = Run(options, PySource().load(), plan, device=device)
    model = run.model
    title = (
        f"{num_params(MODEL):,} parameters; "
        f"a step is {plan.global_batch_size} samples of {MODEL.seq_len} bytes"
    )
    state_bytes = gather_by_position(model, run.planned_state_bytes())
    reporter.show_plan(model.plan, plan_table(model.plan, state_bytes, title=title))
    train(run, reporter)
    reporter.show_end(work_table(model.plan, gather_by_position(model, run.work_done())))
    dist.barrier()  # a rank that leaves early breaks the others' connections
    dist.destroy_process_group()


class Run:
    """The model, its optimizer and its text."""

    def __init__(
        self, options: DemoOptions, corpus: Corpus, plan: Plan, *, device: DeviceSpec
    ) -> None:
        with torch.device("meta"):
            decoder = Decoder(MODEL)
        self.options = options
        self.model = HetFSDP(decoder, plan, seed=options.seed, device_spec=device)
        self.seconds_by_activity = dict.fromkeys(Activity, 0.0)
        self.grad_bytes = 0  # of the last step
        self.model.add_observer(self._observe)
        self.optimizer = torch.optim.AdamW(decay_groups(self.model), betas=(0.9, 0.95))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: lr_fraction(step, options.num_steps)
        )
        self.batches = GlobalBatches(
            corpus=corpus,
            seq_len=MODEL.seq_len,
            global_batch_size=plan.global_batch_size,
            seed=options.seed,
        )
        self.judged = held_out_windows(
            corpus,
            seq_len=MODEL.seq_len,
            num_samples=options.num_judged_batches * plan.global_batch_size,
        )
        self.table_scores = table_scores(corpus.train, self.judged)

    def planned_state_bytes(self) -> int:
        """What this rank will store: parameters, gradients and optimizer state."""
        return STATE_TENSORS * sum(param.nbytes for param in self.model.parameters())

    def work_done(self) -> WorkDone:
        """What this rank has done so far, as measured."""
        moments = [
            tensor
            for state in self.optimizer.state.values()
            for tensor in state.values()
            if tensor.ndim > 0  # not the step counter
        ]
        param_bytes = sum(param.nbytes for param in self.model.parameters())
        rank_plan = self.model.plan.ranks[self.model.position]
        seconds = self.seconds_by_activity
        compute_s = seconds[Activity.FORWARD] + seconds[Activity.BACKWARD]
        return WorkDone(
            num_samples=self.model.step * rank_plan.rank_batch_size,
            compute_s=compute_s,
            wait_s=sum(seconds.values()) - compute_s,
            state_bytes=param_bytes + self.grad_bytes + sum(each.nbytes for each in moments),
        )

    def _observe(self, event: Event) -> None:
        self.seconds_by_activity[event.activity] += event.end_s - event.start_s

    def my_part(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Tokens and targets of this rank's samples; no rows if it only stores."""
        part = deal(batch, self.model.plan, self.model.position)
        return torch.from_numpy(part.tokens), torch.from_numpy(part.targets)


def decay_groups(model: HetFSDP) -> list[dict[str, Any]]:
    """Matrices decay; the norms' vectors do not."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim >= 2], "lr": PEAK_LR, "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim < 2], "lr": PEAK_LR, "weight_decay": 0.0},
    ]


def lr_fraction(step: int, num_steps: int) -> float:
    """Linear warm-up, then half a cosine; ``step`` counts from 0."""
    num_warmup_steps = max(1, round(WARMUP_FRACTION * num_steps))
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    progress = (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * cosine


def train(run: Run, reporter: Reporter) -> None:
    """All steps, with looks at the held-out text before, between and after."""
    num_steps = run.options.num_steps
    looks = {num_steps * i // run.options.num_evaluations for i in range(1, num_steps + 1)}
    reporter.show_held_out(0, held_out_bits_per_byte(run), run.table_scores)
    with reporter.bar:
        for step in range(1, num_steps + 1):
            reporter.show_step(train_step(run))
            if step in looks:
                reporter.show_held_out(step, held_out_bits_per_byte(run), run.table_scores)


def train_step(run: Run) -> StepMetrics:
    """One optimizer step on the next global batch.  Collective."""
    start_s = time.perf_counter()
    model, learning_rate = run.model, float(run.scheduler.get_last_lr()[0])
    loss_sum, num_tokens = model(*run.my_part(run.batches[model.step]))
    mean_loss = model.backward(loss_sum, num_tokens)
    assert mean_loss is not None  # every window has targets
    grad_norm = model.clip_grad_norm_(1.0)
    run.optimizer.step()
    run.grad_bytes = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    run.optimizer.zero_grad()
    run.scheduler.step()
    return StepMetrics(
        step=model.step,
        train_bits_per_byte=mean_loss / math.log(2),
        grad_norm=float(grad_norm),
        learning_rate=learning_rate,
        num_tokens=model.plan.global_batch_size * MODEL.seq_len,
        step_time_s=time.perf_counter() - start_s,
    )


@torch.no_grad()
def held_out_bits_per_byte(run: Run) -> float:
    """Over all judged windows, dealt out like training batches.  Collective."""
    totals = torch.zeros(2, dtype=torch.float64)  # nats, tokens
    batch_size = run.model.plan.global_batch_size
    run.model.eval()
    for start in range(0, run.judged.num_samples, batch_size):
        batch = run.judged.samples(Span(start, start + batch_size))
        loss_sum, num_tokens = run.model(*run.my_part(batch))
        totals += torch.tensor([float(loss_sum), float(num_tokens)], dtype=torch.float64)
    run.model.train()
    dist.all_reduce(totals)
    return float(totals[0] / totals[1]) / math.log(2)


def gather_by_position(model: HetFSDP, value: Any) -> list[Any]:
    """Every rank's value, in plan order.  Collective."""
    pairs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pairs, (model.position, value))
    return [value for _, value in sorted(pairs, key=lambda pair: pair[0])]


if __name__ == "__main__":
    main()
