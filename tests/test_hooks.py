"""Hooks do the same in a loop of one's own and in HetTrainer (`train`: test_stop_on_signal).

Each feature is a class of hooks, tried in both; a run that was told to end and goes on has the
losses of one that nothing has happened to.
"""

import json
import math
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shardhet
from shardhet import (
    After,
    HetFSDP,
    Hook,
    Hooks,
    Plan,
    SaveCheckpoints,
    StopOnSignal,
    Trace,
    redistribute,
)
from shardhet.checkpoint import CheckpointError, Checkpoints, Replicas
from tests.worlds import TRANSFORMERS, on_ranks, preload, run_ranks, run_ranks_expecting_failure

preload(*TRANSFORMERS)

PLAN = Plan.by_hand(microbatch_sizes=[2, 1], rank_batch_sizes=[5, 3], state_shares=[0.2, 0.8])
NUM_EPOCHS, STEPS_IN_EPOCH = 3, 4
NUM_STEPS = NUM_EPOCHS * STEPS_IN_EPOCH
TOLD_IN_STEP = 6
FIRST_CASE_S = 110.0  # every rank imports transformers once, on a busy machine slowly


class Seen(Hook):
    """Keeps the losses, and does one deed before a step."""

    def __init__(self, deed: Any = None, at_step: int = 0) -> None:
        self.losses: dict[int, float | None] = {}
        self._deed, self._at_step = deed, at_step

    def before_step(self, step: int) -> None:
        if step == self._at_step:
            self._deed()

    def after_step(self, step: int, loss: float | None) -> None:
        self.losses[step] = loss


def signalled(rank: int) -> Any:
    """One rank gets SIGTERM."""
    return lambda: os.kill(os.getpid(), signal.SIGTERM) if rank == 1 else None


class Own:
    """A model with dropout and a scheduler, in a loop of its own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        inputs = torch.randn(STEPS_IN_EPOCH * 8, 6).double()
        layers = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh()) for _ in range(2)]
        module = nn.Sequential(*layers, nn.Linear(6, 1)).double()
        loss_fn = shardhet.mean_of_samples(F.mse_loss)
        self.model = HetFSDP(module, PLAN, loss_fn=loss_fn)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
        self.loader = shardhet.loader(dataset, self.model)
        # Batches, by count, whose loss is bad on this rank, and that are not trained on.
        self.bad: list[int] = []
        self.left_out: list[int] = []

    @property
    def state(self) -> dict[str, Any]:
        return {"loader": self.loader, "scheduler": self.scheduler}

    def train(self, hooks: list[Hook], **options: Any) -> None:
        number = 0
        with Hooks(self.model, self.optimizer, hooks, **options) as run:
            for x, y in run.steps(self.loader, num_epochs=NUM_EPOCHS):
                number += 1
                if number - 1 in self.left_out:
                    continue
                y = y * math.nan if number - 1 in self.bad else y
                self.model.forward_backward(x, loss_inputs=y)
                self.model.clip_grad_norm_(1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()

    def saving(self, folder: str, **options: Any) -> SaveCheckpoints:
        return SaveCheckpoints(folder, state=self.state, **options)


def end_and_go_on(rank: int, folder: str) -> Any:
    """Told to end in a step, and started again; beside a run that was not."""
    whole, seen = Own(), Seen()
    whole.train([seen])
    told = Seen(signalled(rank), TOLD_IN_STEP)
    stopped = Own()
    stopped.train([told, stopped.saving(folder), StopOnSignal()])
    saved = Checkpoints(folder).steps()
    before = dict(told.losses)
    again = Own()
    again.train([told, again.saving(folder, every=5)])
    states = [each.model.state_dict() for each in (whole, again)]
    return seen.losses, before, told.losses, saved, Checkpoints(folder).steps(), states


def test_a_loop_that_is_told_to_end_saves_and_goes_on(tmp_path: Path) -> None:
    for rank, result in enumerate(run_ranks(end_and_go_on, 2, str(tmp_path))):
        expected, before, losses, saved, kept, (whole, again) = result
        assert saved == [TOLD_IN_STEP]
        assert list(before) == list(range(1, TOLD_IN_STEP + 1))
        assert losses == expected
        assert list(losses) == list(range(1, NUM_STEPS + 1))
        assert kept == [10, NUM_STEPS]  # the newest two
        if rank == 0:
            assert all(torch.equal(whole[name], again[name]) for name in whole)


def go_on_from_replicas(rank: int, folder: str) -> Any:
    """A loop that fails before step 8, and is started again on the same nodes."""
    whole, seen = Own(), Seen()
    whole.train([seen])
    losses = Seen()

    def train() -> None:
        own = Own()
        saves = own.saving(folder, every_minutes=0, replicas=Replicas(f"{folder}/node"))

        def fail() -> None:
            saves.close()  # what was on its way is complete
            raise ConnectionError

        own.train([Seen(fail, 8 if not losses.losses else 0), losses, saves])

    with suppress(ConnectionError):
        train()
    before = list(losses.losses)
    train()
    return seen.losses, before, losses.losses, Checkpoints(folder).steps()


def test_a_loop_goes_on_from_replicas(tmp_path: Path) -> None:
    for expected, before, losses, saved in run_ranks(go_on_from_replicas, 2, str(tmp_path)):
        assert before == list(range(1, 8))
        assert losses == expected
        assert not saved


@on_ranks(2)
def test_a_checkpoint_without_what_is_needed_is_refused(rank: int, tmp_path: Path) -> None:
    own = Own()
    Checkpoints(str(tmp_path)).save(own.model, own.optimizer, step=0)
    with pytest.raises(CheckpointError, match="has no random_states, loader, scheduler"):
        own.train([own.saving(str(tmp_path))])


def stop_by_loss(rank: int) -> list[int]:
    """One rank alone wants to stop; hooks after one that rolls back are not called."""

    class Stop(Hook):
        def after_step(self, step: int, loss: float | None) -> After | None:
            return After.STOP if rank == 1 and step == 3 else None

    seen, own = Seen(), Own()
    own.train([Stop(), seen])
    return list(seen.losses)


def test_all_ranks_stop_after_the_step_in_which_they_learn_of_it() -> None:
    assert run_ranks(stop_by_loss, 2) == [[1, 2, 3, 4]] * 2


def traced_names(folder: str, rank: int) -> list[str]:
    trace = json.loads(Path(folder, f"rank{rank}.json").read_text())
    return [event.get("name") for event in trace["traceEvents"]]


def traced(rank: int, folder: str) -> int:
    """How often a forward is there; the loop has fewer steps than are asked for."""
    Own().train([Trace(folder, first_step=NUM_STEPS - 1, num_steps=7)])
    return traced_names(folder, rank).count("forward 0 [0]")


def test_a_loop_is_traced(tmp_path: Path) -> None:
    assert run_ranks(traced, 2, str(tmp_path)) == [2, 2]


class Moves(Hook):
    """Follows a plan with other batches from the third step on."""

    def begin(self, run: Hooks) -> None:
        self._run = run

    def after_step(self, step: int, loss: float | None) -> None:
        if step == 2:
            plan = Plan.by_hand(microbatch_sizes=[1, 2, 2], rank_batch_sizes=[1, 2, 4])
            self._run.optimizers[0].zero_grad()
            redistribute(self._run.model, self._run.optimizers, plan)


def in_het_trainer(rank: int, folder: str) -> Any:
    """As in a loop of one's own: traced, told to end, and resumed; and under two plans."""
    from tests.test_hf_resuming import make
    from tests.trainer_options import PLAN, as_torchrun_starts

    with as_torchrun_starts(rank, PLAN.world_size):
        seen, told, after = Seen(), Seen(signalled(rank), TOLD_IN_STEP), Seen()
        moved = Seen()
        make(f"{folder}/moved", PLAN, hooks=[moved, Moves()], save_strategy="no").train()
        trace = Trace(f"{folder}/traces", first_step=2, num_steps=2)
        make(f"{folder}/whole", PLAN, hooks=[seen, trace], save_strategy="no").train()
        handler = signal.getsignal(signal.SIGTERM)
        stopped = make(f"{folder}/run", PLAN, hooks=[told, StopOnSignal()], save_steps=100)
        stopped.train()
        assert stopped.state.global_step == TOLD_IN_STEP
        assert signal.getsignal(signal.SIGTERM) is handler
        resumed = make(f"{folder}/run", PLAN, hooks=[after], save_steps=100)
        resumed.train(resume_from_checkpoint=True)
        with pytest.raises(ValueError, match="Set save_strategy and save_steps"):
            make(f"{folder}/run", PLAN, hooks=[SaveCheckpoints(folder)])
        name = "forward model.layers.0 [0]"
        return (
            seen.losses,
            told.losses | after.losses,
            traced_names(trace._folder, rank).count(name),
            moved.losses,
        )


def test_a_het_trainer_has_the_same_hooks(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the hf extra")
    found = run_ranks(in_het_trainer, 3, str(tmp_path), timeout_s=2 * FIRST_CASE_S)
    for expected, losses, num_traced, under_two in found[:2]:
        assert losses == expected
        assert under_two == pytest.approx(expected, rel=1e-12)
        assert num_traced >= 2
    assert found[2][:2] == found[0][:2]


class Rows(Hook):
    """Keeps this rank's rows of parameters after each step."""

    def __init__(self) -> None:
        self.by_step: dict[int, list[torch.Tensor]] = {}

    def begin(self, run: Hooks) -> None:
        self._model = run.model

    def after_step(self, step: int, loss: float | None) -> None:
        self.by_step[step] = [p.detach().clone() for p in self._model.parameters()]

    def are_same(self, one: int, other: int) -> bool:
        pairs = zip(self.by_step[one], self.by_step[other], strict=True)
        return all(torch.equal(*pair) for pair in pairs)


def bad_steps(rank: int, folder: str) -> Any:
    """A loop that skips a bad batch, and one that rolls back, beside one that leaves it out."""
    told: list[str] = []
    skipping, rows, seen = Own(), Rows(), Seen()
    skipping.bad = [5] if rank == 1 else []

    def say(text: str, level: int) -> None:
        told.append(text)

    skipping.train([rows, shardhet.BadStepGuard(shardhet.OnBadStep.SKIP), seen], say=say)
    assert rows.are_same(5, 6)
    assert not rows.are_same(6, 7)
    assert list(map(math.isnan, seen.losses.values())) == [i == 5 for i in range(NUM_STEPS)]
    rolling, losses = Own(), Seen()
    rolling.bad = skipping.bad
    guard = shardhet.BadStepGuard(shardhet.OnBadStep.ROLL_BACK)
    assert guard.state_name == "guard"  # as `shardhet train` keeps it, and older checkpoints
    rolling.train([rolling.saving(folder, every=4), guard, losses], say=say)
    reference, expected = Own(), Seen()
    reference.left_out = [4, 5]
    reference.train([expected])
    states = [each.model.state_dict() for each in (rolling, reference)]
    with pytest.raises(ValueError, match="hooks have no SaveCheckpoints"):
        Own().train([guard])
    return told, losses.losses, expected.losses, states


def test_a_bad_step_changes_nothing_or_takes_the_loop_back(tmp_path: Path) -> None:
    for rank, result in enumerate(run_ranks(bad_steps, 2, str(tmp_path))):
        told, losses, expected, (rolled, reference) = result
        assert told == [
            "step 6 was skipped: the loss is nan",
            "step 6 was skipped: the loss is nan; rolled back to step 4, on with the batch "
            "after it",
        ]
        assert losses == expected
        if rank == 0:
            assert all(torch.equal(rolled[name], reference[name]) for name in rolled)


def stopped(rank: int) -> None:
    own = Own()
    own.bad = [2] if rank == 1 else []
    own.train([shardhet.BadStepGuard()])


def test_a_guard_stops_all_ranks_by_default() -> None:
    for outcome in run_ranks_expecting_failure(stopped, 2):
        assert outcome.exception_name == "FloatingPointError", outcome
        assert "step 3: the loss is not finite at positions [1]" in outcome.message


def spikes(rank: int, folder: str) -> Any:
    """A HetTrainer whose loss is NaN, and then large, on one rank."""
    from tests.test_hf_resuming import make
    from tests.trainer_options import PLAN, as_torchrun_starts, loss_in_float64

    with as_torchrun_starts(rank, PLAN.world_size):
        rows, guard = Rows(), shardhet.BadStepGuard(shardhet.OnBadStep.SKIP, spike_factor=20.0)
        trainer = make(folder, PLAN, hooks=[rows, guard], max_steps=15, save_strategy="no")
        factors = {2: math.nan, 12: 1e4}

        def loss_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
            is_bad = rank == 1 and trainer.het.training
            factor = factors.get(trainer.het.step, 1.0) if is_bad else 1.0
            return factor * loss_in_float64(outputs, labels, num_items_in_batch)

        trainer.compute_loss_func = loss_of
        trainer.train()
        changed = [not rows.are_same(step, step - 1) for step in range(2, 16)]
        history = trainer.state.log_history
        skipped = [each["step"] for each in history if "is_skipped" in each]
        return changed, skipped, [each["step"] for each in history if "grad_norm" in each]


def test_a_het_trainer_skips_bad_steps(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the hf extra")
    for changed, skipped, logged in run_ranks(spikes, 3, str(tmp_path), timeout_s=FIRST_CASE_S):
        assert logged == list(range(1, 16))  # as without hooks
        assert changed == [step not in (3, 13) for step in range(2, 16)]
        assert skipped == [3, 13]
