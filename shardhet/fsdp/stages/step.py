"""A step of a pipeline on this rank: all its rounds, of which several are in flight.

[Note: What waits for what]
Before the first round all ranks agree on the samples of every round, and gather the root.  From
then on a rank waits for its own stage (gathers and reductions of its units) and for what it
receives from the stages beside it, in one order that is the same for all ranks of the stage
(``records.ops``).  What it receives next is launched ahead, so that it arrives meanwhile;
``stage_transfer`` says which stream waits for which.  When a stage has taken all its turns it
waits for the others, to reduce the root's gradients.  On an accelerator the host reads once a
step, when all is queued: checksums of the samples, and in the last stage the losses.

[Note: The output of several rounds]
Nothing but the model knows how outputs of rounds become that of all samples: losses are summed
or averaged, logits joined.  So without gradients the last stage collects the tensors of all
rounds and runs its part once, on all samples of the rank, while the stages before it take one
round after the other.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.autograd.graph import GradientEdge

from shardhet.comm.calls import HostCopy
from shardhet.comm.channel import progress
from shardhet.fsdp.microbatch.batching import named_leaves
from shardhet.fsdp.microbatch.layered import run_backward
from shardhet.fsdp.microbatch.loss import Laws, Output, loss_pair
from shardhet.fsdp.microbatch.signature import CHECKSUM_END, ModelCall
from shardhet.fsdp.probing.attempt import RunModule
from shardhet.fsdp.sharding.persistence import forget_changed
from shardhet.fsdp.stages.channels import refuse
from shardhet.fsdp.stages.exchange import StageExchange
from shardhet.fsdp.stages.kinds import CallKinds
from shardhet.fsdp.stages.stage_transfer import ReceivedTensors, differentiable, edges_of
from shardhet.fsdp.step.around import Activity
from shardhet.fsdp.step.mean_loss import (
    MeanLoss,
    check_graph,
    check_is_number,
    check_is_wide,
    check_scaler,
    wants_gradient,
)
from shardhet.fsdp.step.rounds import Round, RoundKey, Rounds, check_fits_plan
from shardhet.fsdp.step.runtime import Runtime
from shardhet.records.layout import Span
from shardhet.records.plan import Plan
from shardhet.records.schedule import Phase, RoundPhase, one_forward_one_backward

PASS_SAMPLE_INDICES = "Pass each rank the samples of plan.sample_indices(model.position)."


class RoundInputs(NamedTuple):
    """What a rank is passed in a round."""

    num_samples: int
    lengths: Any  # shapes without samples
    divisor: float | None = None  # of its loss, if that is known

    @classmethod
    def of(cls, call: ModelCall, divisor: float | None) -> "RoundInputs":
        """That of a call."""
        return cls(call.num_samples, call.lengths, divisor)


def rounds_of(
    plan: Plan,
    of_step: Rounds,
    calls: Sequence[ModelCall],
    told: Sequence[Any],
    *,
    caller: str,
) -> list[Round]:
    """The rounds that have samples, given what every rank is passed in each, by position.

    Raises ``ValueError``, on all ranks, unless all stages have the same samples.
    """
    rounds: list[Round] = []
    before = 0
    for number, call in enumerate(calls):
        row: list[RoundInputs] = [each[number] for each in told]
        _check_round(plan, row, f"{caller}: in round {number}")
        sizes = [each.num_samples for each in row]
        if any(sizes):
            round_key = RoundKey(of_step.step, len(rounds), before)
            rounds.append(of_step.of(call, sizes, round_key))
            rounds[-1].divisor = row[0].divisor
            before += rounds[-1].num_together
    return rounds


def _check_round(plan: Plan, row: Sequence[RoundInputs], where: str) -> None:
    planned = [rank.rank_batch_size for rank in plan.ranks]
    check_fits_plan(planned, [each.num_samples for each in row], where, PASS_SAMPLE_INDICES)
    counts = [sum(row[i].num_samples for i in each) for each in plan.groups]
    if len(set(counts)) > 1:
        raise ValueError(
            f"{where} the stages got {counts} samples but must get the same. "
            f"{PASS_SAMPLE_INDICES}"
        )
    if len(numbers := {len(each.lengths) for each in row if each.num_samples}) > 1:
        raise ValueError(
            f"{where} ranks pass {sorted(numbers)} arguments but all must pass the same. Each "
            "entry of a list counts as one: pass tensors with a row for each sample instead."
        )
    if len({str(each.lengths) for each in row if each.num_samples}) > 1:
        raise ValueError(
            f"{where} arguments have shapes {[each.lengths for each in row]} without samples, "
            "in plan order, but stages hand over samples of one shape. Pad them alike on all "
            "ranks."
        )


def check_samples(
    plan: Plan, told: Sequence[Any], checksums: Sequence[Sequence[float]], caller: str
) -> None:
    """Raise ``ValueError``, on all ranks, unless all stages were passed the same samples.

    ``told`` are what every rank was passed in each round, by position, and ``checksums`` those
    of ``ModelCall.checksums``, round after round.
    """
    for number in range(len(told[0])):
        sums = [
            (each[number].num_samples, *map(int, row[2 * number : 2 * number + 2]))
            for each, row in zip(told, checksums, strict=True)
        ]
        if len({_checksum([sums[i] for i in each]) for each in plan.groups}) > 1:
            raise ValueError(
                f"{caller}: in round {number} the stages were passed other samples or other "
                f"values, or in another order. Pass all arguments on every rank. "
                f"{PASS_SAMPLE_INDICES}"
            )


def _checksum(parts: Sequence[tuple[int, int, int]]) -> int:
    """A number for the samples of a round in their order."""
    total, first = 0, 0
    for num_samples, plain, placed in parts:
        total += first * plain + placed
        first += num_samples
    return total % CHECKSUM_END


class Pipeline:
    """The steps of one rank of a pipeline."""

    def __init__(self, runtime: Runtime, mean: MeanLoss, run_module: RunModule) -> None:
        self._runtime, self._mean = runtime, mean
        self._kinds = CallKinds(runtime, run_module)
        self._plan = runtime.plan
        self._control, self._peers = runtime.control, runtime.peers
        self._run_module = run_module
        self._comm = comm = runtime.root_comm
        self._stage = stage = runtime.stage
        self._is_last = stage == len(runtime.in_flight) - 1
        self._exchange = StageExchange(runtime, self._kinds)
        # Of the step in progress
        self._told: list[
            list[RoundInputs]
        ] = []  # what every rank is passed, by position and round
        self._rounds: list[Round] = []
        # By round, from forward to backward
        self._arrived: dict[int, ReceivedTensors] = {}
        self._made: dict[int, list[GradientEdge | None]] = {}  # that get a gradient
        self._seeds: dict[int, Tensor] = {}  # in the dtype of the loss
        self._seed = torch.ones(())  # the gradient of each round's loss, on the device
        self._sums = torch.zeros(2, dtype=torch.float64, device=comm.device)  # losses, tokens

    def step(
        self,
        calls: Sequence[ModelCall],
        scaler: GradScaler | None = None,
        *,
        is_training: bool,
        divisors: Sequence[float | None] = (),
    ) -> float | None:
        """All rounds of a step, given this rank's call of each; the mean loss.  Collective.

        Gradients are those of the loss times the scale of ``scaler``.  With ``divisors`` of all
        rounds they are those of the sum of the rounds' losses over them, which is returned.
        """
        runtime, exchange = self._runtime, self._exchange
        with self._peers.fail_together("forward_backward"):
            check_scaler(scaler, is_float16=self._mean.is_float16)
            _check_arguments(calls)
            calls = self._agree("forward_backward", calls, divisors)
            if not self._rounds:
                raise ValueError(
                    f"forward_backward: no rank has samples. {PASS_SAMPLE_INDICES}"
                )
            runtime.begin_step()
            self._unshard_root()
            runtime.norms.begin()
            self._kinds.know(self._rounds, is_training=is_training)
            kinds = map(self._kinds.of, self._rounds)
            if len({each.findings.schedule.segments for each in kinds}) > 1:
                raise ValueError(
                    "forward_backward: rounds of a step call units in different ways, which "
                    "stages cannot do yet. Call them in one way in all rounds."
                )
            number = len(self._rounds)
            is_divided = None not in [each.divisor for each in self._rounds]
            scale = None if is_divided else _scale(self._rounds)
            seed = torch.full_like(self._sums.zero_()[0], scale or 1.0)
            # On every rank: a scaler that has not scaled anything refuses to unscale.
            self._seed = seed if scaler is None else scaler.scale(seed)
            checksums = _checksums(calls, self._comm.device)
            sums: HostCopy | None = None
            order = one_forward_one_backward(number, runtime.in_flight[self._stage])
            exchange.begin_step(self._rounds)
            self._kinds.lay_out(self._rounds[0], number, exchange.hand_over)
            for now, following in zip(order, [*order[1:], order[-1]], strict=True):
                runtime.begin_phase(now, following)
                name = f"stage {runtime.stage}: {now.phase.value} of round {now.round}"
                with runtime.observers.label(name):
                    if now.phase is Phase.FORWARD:
                        self._forward(now, is_training=is_training)
                    else:
                        self._do_backward(now)
                if self._is_last and now == RoundPhase(number - 1, Phase.FORWARD):
                    sums = HostCopy(self._sums)
                runtime.executor.go_on()  # sends what it has made, gathers for the next
            exchange.flush()
            progress.mark("reducing the gradients that all stages share")
            runtime.reduce_rest()
            runtime.norms.apply(self._control)
            has_grad = self._mean.agree_on_grads()
            mine = [0.0, 0.0] if sums is None else sums.read().tolist()
            known = runtime.known
            rows = self._share([*mine, known.written], checksums, "forward_backward")
            have_samples = [any(of.num_samples for of in each) for each in self._told]
            known.check_written([row[2] for row in rows], have_samples)
            check_graph(any(has_grad), any(have_samples))
        of_loss = torch.tensor(rows, dtype=torch.float64)[:, :2]
        self._mean.is_divided = is_divided
        return self._mean.end_step(of_loss, has_grad, scale)

    def _share(
        self, numbers: Sequence[float], checksums: HostCopy, caller: str
    ) -> list[list[float]]:
        """Every rank's ``numbers``, once all stages have had the same samples.  Collective."""
        mine = [*numbers, *checksums.read().flatten().tolist()]
        with self._runtime.observers.watch("", Activity.AGREE):
            rows = self._control.exchange(mine)
        n = len(numbers)
        check_samples(self._plan, self._told, [row[n:] for row in rows], caller)
        return [row[:n] for row in rows]

    def evaluate(
        self, call: ModelCall, calls: Sequence[ModelCall], *, is_training: bool
    ) -> Any:
        """The model's output for the samples of ``call``, which ``calls`` has by round.

        On ranks of other stages than the last, an output without samples; None if no rank has
        samples.  Collective, without gradients.  See [Note: The output of several rounds].
        """
        runtime, output = self._runtime, None
        with self._peers.fail_together("model(...)"):
            is_there = is_training and bool(len(runtime.norms))
            refuse("batch norm in training mode", is_there=is_there, where="model(...)")
            calls = self._agree("model(...)", calls)
            if not self._rounds:
                return None
            self._unshard_root()
            checksums = _checksums(calls, self._comm.device)
            self._exchange.begin(self._rounds, {Phase.FORWARD: 1, Phase.BACKWARD: 0})
            sizes = [sum(each) for each in zip(*(r.sizes for r in self._rounds), strict=True)]
            whole = runtime.rounds.of(call, sizes, RoundKey(runtime.rounds.step))
            self._kinds.know([whole], is_training=is_training)
            for each in self._rounds:
                each.index = whole.index
            parts = [whole] if self._is_last else self._rounds
            self._kinds.lay_out(whole, len(parts))
            for each in parts:
                received = self._collect(whole) if self._is_last else self._arrive(each)
                output = self._kinds.forward(each, received, is_training=is_training)
                if not self._is_last:
                    self._hand_on(each, output)
            self._exchange.flush()
            runtime.end_rounds()
            self._share([], checksums, "model(...)")
        if self._is_last:
            return output
        return self._kinds.of(whole).findings.make_empty_output(runtime.calls.anchor)

    def _collect(self, whole: Round) -> list[Tensor]:
        """The tensors that arrive in all rounds, joined."""
        stage_tensors, number = self._kinds.of(whole).received, whole.num_samples
        device = self._comm.device
        joined = [each.rule.new_whole(each.example, number, device) for each in stage_tensors]
        start = 0
        for each in self._rounds:
            span = Span(start, start + each.num_samples)
            for kind, tensor, piece in zip(
                stage_tensors, joined, self._arrive(each), strict=False
            ):
                kind.rule.put(tensor, piece, span, number)
            start = span.stop
        return joined

    def _arrive(self, each: Round) -> list[Tensor]:
        """What a round begins with; what the next one does is on its way."""
        first = each.round_key.round
        for following in self._rounds[first : first + 2]:
            self._exchange.receive(RoundPhase(following.round_key.round, Phase.FORWARD))
        return self._receive(RoundPhase(first, Phase.FORWARD))

    def _hand_on(self, each: Round, output: Sequence[Tensor]) -> None:
        """Send the next stage its samples of what this one has made in a round."""
        of = RoundPhase(each.round_key.round, Phase.FORWARD)
        if each.num_samples:
            self._exchange.give(of, output)
        self._exchange.send(of)

    # Before the rounds

    def _agree(
        self, caller: str, calls: Sequence[ModelCall], divisors: Sequence[float | None] = ()
    ) -> Sequence[ModelCall]:
        """Agree on the rounds of the step that begins; ``calls`` of all of them.  Collective.

        Ranks may have unlike numbers; they have no samples in the others.
        """
        step, of_frozen = self._runtime.rounds.step, self._runtime.of_frozen
        has_changed = any(each.has_changed() for each in of_frozen)
        with self._runtime.observers.watch("", Activity.AGREE):
            flags = 2 * has_changed + torch.is_grad_enabled()
            self._runtime.known.look()
            entered = self._mean.enter(caller, step, float(flags))
            _check_entered(caller, step, [row[1:3] for row in entered])
            if any(row[2] > 1 for row in entered):
                forget_changed(of_frozen, self._control)
            passed = list(map(RoundInputs.of, calls, divisors or [None] * len(calls)))
            told: list[list[RoundInputs]] = self._control.exchange_objects(passed)
        most, none = max(map(len, told)), [replace(calls[-1], num_samples=0)]
        calls = [*calls, *none * (most - len(calls))]
        self._told = [[*each, *[RoundInputs(0, ())] * (most - len(each))] for each in told]
        rounds = self._runtime.rounds
        self._rounds = rounds_of(self._plan, rounds, calls, self._told, caller=caller)
        return calls

    def _unshard_root(self) -> None:
        """On all ranks, before any stage waits for another.  Collective."""
        runtime = self._runtime
        runtime.enter_forward()
        runtime.unshard_root(self._comm.computing, runtime.computing_here)

    def _forward(self, now: RoundPhase, *, is_training: bool) -> None:
        runtime, each = self._runtime, self._rounds[now.round]
        kind, n = self._kinds.of(each), each.num_samples
        received = self._receive(now)
        if n and kind.received_with_grad:
            self._arrived[now.round] = arrived = ReceivedTensors()
            received = arrived.with_grad(received, kind.received, runtime.calls.anchor)
        output = self._kinds.forward(each, received, is_training=is_training)
        if not n:
            return
        if self._is_last:
            divisor = each.divisor or 1.0
            loss_sum = self._loss_of(output, kind.findings.reductions, divisor)
            self._made[now.round] = edges_of([loss_sum])
            self._seeds[now.round] = (self._seed / divisor).to(loss_sum.dtype)
            return
        self._made[now.round] = edges_of(differentiable(output, kind.sent))
        self._exchange.give(now, [tensor.detach() for tensor in output])

    def _receive(self, now: RoundPhase) -> list[Tensor]:
        """What the stage before hands over for the forward of a round, once it is here."""
        return [each for each in self._exchange.take(now) if each is not None]

    def _loss_of(self, output: Any, reductions: Laws, divisor: float) -> Tensor:
        loss_sum, num_tokens = loss_pair(output)
        check_is_number(loss_sum)
        if len(self._rounds) > 1 or len(self._runtime.computing_here) > 1:
            Output(named_leaves(output), reductions).check_adds_up(
                loss_sum, num_tokens, "forward_backward"
            )
        check_is_wide(loss_sum, "forward_backward")
        self._mean.check_leaves(loss_sum, divides_late=True)
        self._sums[0] += loss_sum.detach().double() / divisor
        self._sums[1] += num_tokens
        return loss_sum

    def _do_backward(self, now: RoundPhase) -> None:
        runtime, each = self._runtime, self._rounds[now.round]
        made = self._made.pop(now.round, [])
        begins = each.num_samples and self._is_last
        grads = [self._seeds.pop(now.round)] if begins else self._exchange.take(now)
        runtime.backward_round(each, partial(run_backward, made, grads))
        if (arrived := self._arrived.pop(now.round, None)) is not None:
            self._exchange.give(now, arrived.grads)


def _check_arguments(calls: Sequence[ModelCall]) -> None:
    """Raise ``ValueError`` if one requires a gradient."""
    for leaf in (leaf for call in calls for leaf in call.leaves):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise ValueError(wants_gradient("forward_backward", leaf))


def _check_entered(caller: str, step: int, rows: Sequence[Sequence[float]]) -> None:
    """Raise ``ValueError``, on all ranks, unless all take this step, with gradients or not."""
    needed = caller == "forward_backward"
    found = [[int(finished), int(flags) % 2] for finished, flags in rows]
    if any(each != [step, needed] for each in found):
        raise ValueError(
            f"{caller}: ranks differ in [finished steps, gradients enabled]: {found} in plan "
            "order. Call it in the same way on every rank, with gradients "
            f"{'en' if needed else 'dis'}abled."
        )


def _checksums(calls: Sequence[ModelCall], device: torch.device) -> HostCopy:
    """Those of the samples of all rounds, [rounds, 2], read when the step is queued."""
    return HostCopy(torch.stack([each.checksums(device) for each in calls]))


def _scale(rounds: Sequence[Round]) -> float:
    """By what losses are multiplied: see [Note: Scale of the loss] in ``round_by_round``."""
    return 2.0 ** -round(math.log2(sum(each.num_together for each in rounds)))
