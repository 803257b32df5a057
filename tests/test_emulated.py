"""On an emulated accelerator with NCCL's rules: right, in order, and nothing sent in vain."""

import copy
import gc
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardhet import HetFSDP, Plan, redistribute
from shardhet.apps.launch.crash import RankConsole
from shardhet.apps.launch.rank_env import RankEnv
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.apps.run.worker import Run
from shardhet.comm import devices
from shardhet.comm.calls import SWITCH
from shardhet.comm.channel import Channel, progress
from shardhet.comm.collectives import all_gather_uneven
from shardhet.comm.groups import Communicators, default_group
from shardhet.fsdp.sharding.flat import FlatTensor
from shardhet.fsdp.sharding.unit import FSDPUnit
from shardhet.fsdp.step.around import Activity
from shardhet.fsdp.step.schedule_executor import RUNS, Handling
from shardhet.records.ops import ops_of
from shardhet.records.schedule import GATHER, LaunchKind
from shardhet.training.guard import BadStepGuard
from shardhet.training.hooks.bad_steps import OnBadStep
from tests.drawn_cases import Case, draw_case, draw_rounds
from tests.emulated.accelerator import Accelerator
from tests.emulated.memory import RaceError
from tests.emulated.nccl import Communicator, Launched
from tests.parity import (
    Batch,
    Course,
    Problem,
    check_parity,
    part_of,
    train_step,
)
from tests.programs import SMALL_MODEL
from tests.selection import one_in, only
from tests.test_trainer import make_trainer
from tests.test_worker import configure
from tests.worlds import ends_all_ranks, on_ranks, run_ranks, run_ranks_expecting_failure

# The rest for campaigns; more of them: SHARDHET_EMULATED_CASES=500
NUM_CASES = int(os.environ.get("SHARDHET_EMULATED_CASES", "48"))
CASES_PER_BLOCK = 2
PART_BY_WORLD_SIZE = {1: 0.125, 2: 0.375, 3: 0.25, 4: 0.25}
BLOCKS = [
    (world_size, block)
    for world_size, part in PART_BY_WORLD_SIZE.items()
    for block in range(max(1, round(part * NUM_CASES / CASES_PER_BLOCK)))
]
FEW = [(1, 1), (2, 0)]  # in rounds or not, in one format or two
Launches = dict[str, Communicator]
FIRST_SEED = 5000  # other cases than those of test_parity


def on_device(batch: Batch, device: torch.device) -> Batch:
    return {name: each.to(device) for name, each in batch.items()}


def take(
    accelerator: Accelerator,
    model: HetFSDP,
    problem: Problem,
    plan: Plan,
    batch: Batch,
    course: Course,
    step: int,
) -> float | None:
    """Forward and backward of all rounds; checks that what the plan says is sent."""
    num_probes = len(model._runtime.known._findings)
    by_group = accelerator.nccl.communicators
    before = sum(each.received_bytes for each in by_group.values())
    launched = {group: len(each.collectives) for group, each in by_group.items()}
    batches = rounds_of(batch, course.rank_batch_sizes[step], model)
    mine = [on_device(each, accelerator.device) for each in batches]
    accelerator.syncs.clear()
    for each in mine:
        mean = train_step(model, problem, each, course)
    if len(model._runtime.known._findings) == num_probes:
        # The host reads the losses when backward is queued, and nothing else but gradients
        # that are to be on the host, and by which factor a loss has what the model returns;
        # in several rounds also by what losses were multiplied.
        syncs, losses = accelerator.syncs, "comm/calls.py read: event"
        if plan.ranks[model.position].optimizer_on_host:
            gradients = {"comm/copy_streams.py wait: event"}
            if course.steps_between_zero_grad > 1:  # to memory that is not pinned
                gradients.add("fsdp/sharding/persistence.py make: copy_")
            assert set(syncs) <= {losses, *gradients}, syncs
        else:
            assert set(syncs) == {losses}, syncs
            assert len(syncs) <= 2 or len(batches) > 1, syncs
        for group, communicator in by_group.items():
            for _, _, stream in communicator.collectives[launched.get(group, 0) :]:
                assert stream == "of priority -1"
        received = sum(each.received_bytes for each in by_group.values()) - before
        assert received == planned_bytes(model)
    accelerator.syncs.clear()
    return mean


def launches_of(accelerator: Accelerator) -> Launches:
    """What was launched, by the name of the group."""
    return {
        group.group_name: replace(each, stream=None)
        for group, each in accelerator.nccl.communicators.items()
    }


def planned_bytes(model: HetFSDP) -> int:
    """What this rank receives in the last step, by its schedule."""
    runtime, comm = model._runtime, model._comm
    if comm.all_gather_channel.group is None:
        return 0
    ops = ops_of(runtime.executor.schedule)
    units = [("gather", runtime.root), ("reduce", runtime.root)]
    units += [
        (op.kind.value, runtime.units[op.unit]) for op in ops if isinstance(op.kind, LaunchKind)
    ]
    num_rounds = model.plan.num_rounds
    total = 16 * (model._control.world_size - 1) * num_rounds  # losses and tokens
    for kind, unit in units:
        for flat in unit.flats:
            own = flat.layout.shard_numels[model.position]
            stays = flat.persistence is not None and flat.persistence.is_held
            if kind == "gather" and comm.is_receiver and not stays:
                total += (flat.layout.numel - own) * flat.param_dtype.itemsize
            elif kind == "reduce" and flat.is_trainable and not flat.grad.is_private:
                total += received_sums(model, flat) * flat.reduce_dtype.itemsize
    return total


def received_sums(model: HetFSDP, flat: FlatTensor) -> int:
    """Elements that this rank receives in a reduction."""
    comm, numels = model._comm, flat.layout.shard_numels
    others = [i for i in comm.receivers if i != model.position]
    computing = comm.reduce_scatter_channel.computing
    if computing is None or computing.positions != comm.receivers:
        return numels[model.position] * len(others)
    if not comm.is_receiver:  # its carrier adds up
        return numels[model.position]
    carried = [
        n
        for n, relays in zip(numels, computing.relays_by_position, strict=True)
        if model.position in relays
    ]
    return sum(carried) * len(others)


def rounds_of(batch: Batch, sizes: Sequence[int], model: HetFSDP) -> list[Batch]:
    """This rank's samples of every round; ``sizes`` are by round and position."""
    places = range(model.position, len(sizes), model.plan.world_size)
    return [part_of(batch, sizes, place) for place in places]


def check_beside_one_process(
    rank: int, case: Case, *, bar: float | None = None, **options: Any
) -> Launches:
    """Every loss and every parameter is that of one process without an accelerator."""
    there = Accelerator()
    options = {**case.problem.options, **options, "device": there.device}

    def lets_nobody_wait(*_: Any) -> list[Tensor]:
        assert not there.syncs  # in the optimizer's step
        return []

    check_parity(
        rank,
        replace(case.problem, options=options),
        case.plan,
        replace(case.course, clip_at=None),
        place=there,
        take=partial(take, there),
        after=lets_nobody_wait,
        bar=bar,
    )
    return launches_of(there)


def check_in_two_formats(rank: int, case: Case) -> Launches:
    """Parameters are float64 between steps, and float32 where they are computed with.

    Numbers of dropout depend on the format, and steps of AdamW blow up errors of rounding.
    """
    case = case.without_dropout()
    case = replace(case, course=replace(case.course, optimizer="sgd"))
    return check_beside_one_process(rank, case, bar=1e-4, param_dtype=torch.float32)


def _run_block(rank: int, world_size: int, block: int) -> list[Launches]:
    launches = []
    for number in range(block * CASES_PER_BLOCK, (block + 1) * CASES_PER_BLOCK):
        draw = draw_rounds if number % 4 == 1 else draw_case
        case = draw(FIRST_SEED + number, world_size=world_size)
        check = check_in_two_formats if number % 8 % 3 == 2 else check_beside_one_process
        try:
            launches.append(check(rank, case))
        except Exception as error:
            error.add_note(str(case))
            raise
        gc.collect(1)
    return launches


@pytest.mark.parametrize("world_size, block", only(FEW, BLOCKS))
def test_a_step_on_an_accelerator_is_the_step_of_one_process(
    world_size: int, block: int
) -> None:
    launches_by_rank = run_ranks(_run_block, world_size, world_size, block, timeout_s=120.0)
    if world_size == 1:
        assert not any(each.collectives for each in all_of(launches_by_rank[0]))
    for of_ranks in zip(*launches_by_rank, strict=True):
        for name in set().union(*of_ranks):
            check_launched_alike([each.get(name) for each in of_ranks])


def all_of(launches: Sequence[Launches]) -> list[Communicator]:
    return [each for of_case in launches for each in of_case.values()]


def check_launched_alike(communicators: Sequence[Communicator | None]) -> None:
    """One communicator's collectives are the same everywhere; each message has two ends."""
    first = next(each for each in communicators if each is not None)
    for rank, each in enumerate(communicators):
        if each is not None:  # this rank is part of it
            assert each.collectives == first.collectives
            for peer, sizes in each.sent.items():
                other = communicators[peer]
                assert other is not None
                assert other.received[rank] == sizes


def _short_batches(rank: int) -> list[int]:
    """Steps and evaluations in which the last ranks have no samples; messages of this rank."""
    plan = Plan.by_hand(microbatch_sizes=[1, 2, 2], state_shares=[0.25, 0.5, 0.25])
    with Accelerator().installed() as accelerator:
        module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
        model = HetFSDP(module, plan, units=[nn.Linear], device=accelerator.device)
        for sizes in ([1, 2, 2], [1, 1, 0], [1, 0, 0]):
            x = torch.ones(sizes[rank], 8).to(accelerator.device)
            with torch.no_grad():
                model(x)
            model.backward(model(x).sum(), sizes[rank])
        return [len(each.sent) for each in accelerator.nccl.communicators.values()]


def test_a_batch_of_fewer_ranks_connects_no_pairs() -> None:
    assert not any(map(sum, run_ranks(_short_batches, 3)))


def _launched(rank: int) -> list[Launched]:
    """All that this rank launches in two steps of two rounds; one rank only stores."""
    plan = Plan.by_hand(
        microbatch_sizes=[1, 0, 2, 1],
        state_shares=[0.25, 0.5, 0, 0.25],
        recompute=[True, False, False, True],
        num_rounds=2,
        reshard_after_forward=False,
    )
    with Accelerator().installed() as accelerator:
        module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
        model = HetFSDP(module, plan, units=[nn.Linear], device=accelerator.device)
        for sizes in ([1, 0, 2, 1], [1, 0, 2, 1], [1, 0, 0, 0], [0, 0, 1, 0]):
            x = torch.ones(sizes[rank], 8).to(accelerator.device)
            model.backward(model(x).sum(), sizes[rank])
            model.clip_grad_norm_(1.0)
        return accelerator.nccl.launched


def test_ranks_launch_what_they_share_in_one_order_over_all_communicators() -> None:
    """Else each of two devices may wait in the kernel that the other has not begun."""
    launched = run_ranks(_launched, 4)
    groups = [{each.group for each in of_rank} for of_rank in launched]

    def shared(rank: int, peer: int) -> list[tuple[Any, ...]]:
        both = groups[rank] & groups[peer]
        return [
            each[:3]
            for each in launched[rank]
            if each.group in both and each.peer in (None, peer)
        ]

    for one, other in combinations(range(4), 2):
        assert len(shared(one, other)) > 20
        assert shared(one, other) == shared(other, one)


class _Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
        return (self.last(self.first(x).tanh())[:, 0] - y).square().sum(), len(y)


@on_ranks(2)
def test_without_a_device_a_rank_takes_its_own_and_copies_what_is_on_the_host(
    rank: int,
) -> None:
    """No device is named, and inputs are on the host, one of them pinned."""
    torch.manual_seed(3)
    module, x, y = _Regression().double(), torch.randn(8, 8).double(), torch.randn(8).double()
    plain = copy.deepcopy(module)
    loss_sum, num_samples = plain(x, y)
    (loss_sum / num_samples).backward()
    plan = Plan.by_hand(microbatch_sizes=[1, 3], state_shares=[0.5, 0.5], num_rounds=2)
    mine = plan.sample_indices(rank)
    with Accelerator().installed() as accelerator:
        model = HetFSDP(module, plan, units=[nn.Linear])
        assert model.device == accelerator.device
        for _ in range(2):
            model.zero_grad()
            accelerator.syncs.clear()
            mean = model.forward_backward(x[mine].pin_memory(), y[mine])
        # That of the losses, once a round: copies of inputs let nobody wait.
        assert accelerator.syncs == ["comm/calls.py read: event"] * 2
        found = {fqn: param.grad.clone() for fqn, param in model.named_parameters()}
        rows = {fqn: box.rows for fqn, box in model.sharded_state_dict().items()}
    assert mean == pytest.approx(float(loss_sum / num_samples), rel=1e-12)
    for fqn, param in plain.named_parameters():
        expected = param.grad[rows[fqn].start : rows[fqn].stop]
        torch.testing.assert_close(found[fqn], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("chosen", "local_rank", "expected"),
    [(0, None, 0), (0, "1", 1), (3, "1", 3), (0, "4", "local rank 4: .* sees 4 cuda devices")],
)
def test_the_accelerator_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, chosen: int, local_rank: str | None, expected: Any
) -> None:
    made: list[int] = []
    host = mock.Mock(
        current_accelerator=lambda check_available: torch.device("cuda"),
        current_device_index=lambda: chosen,
        device_count=lambda: 4,
        set_device_index=made.append,
    )
    monkeypatch.setattr(torch, "accelerator", host)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            devices.of_this_rank()
    else:
        assert devices.of_this_rank() == torch.device("cuda", expected)
        assert made == [expected]


def _over_gloo(rank: int, wants: tuple[str, ...]) -> tuple[list[Tensor], int]:
    """Gradients of one step, whole, and the number of collectives of NCCL."""
    plan = Plan.by_hand(microbatch_sizes=[1, 0, 2], state_shares=[0.25, 0.5, 0.25])
    with (
        mock.patch.dict(os.environ, {SWITCH: wants[rank]}),
        Accelerator().installed() as accelerator,
    ):
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(8, 8, dtype=torch.float64) for _ in range(3)))
        model = HetFSDP(module, plan, units=[nn.Linear], device=accelerator.device)
        start, size = plan.first_sample(rank), plan.ranks[rank].rank_batch_size
        samples = torch.arange(24.0, dtype=torch.float64).view(3, 8)[start : start + size]
        model.backward(model(samples.to(accelerator.device)).square().sum(), size)
        grads = [each.grad.clone().cpu() for each in model.parameters()]
        launched = accelerator.nccl.communicators.values()
        return grads, sum(len(each.collectives) for each in launched)


def test_gloo_carries_tensors_of_accelerators_if_any_rank_wants_it_to() -> None:
    """GPUs of two makers have no other backend in common."""
    by_nccl = run_ranks(_over_gloo, 3, ("auto",) * 3, fresh_world=True)
    by_gloo = run_ranks(_over_gloo, 3, ("auto", "gloo", "auto"), fresh_world=True)
    assert all(number for _, number in by_nccl)
    assert not any(number for _, number in by_gloo)
    for (expected, _), (found, _) in zip(by_nccl, by_gloo, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-12)


@ends_all_ranks(2, "set ddp_backend='gloo' in the training arguments")
def test_a_group_of_nccl_alone_is_refused_where_gloo_is_wanted(rank: int) -> None:
    with (
        mock.patch.dict(os.environ, {SWITCH: "gloo"}),
        Accelerator().installed() as accelerator,
        mock.patch.object(devices, "carries", return_value=False),
    ):
        Communicators.over(default_group(None), accelerator.device)


@on_ranks(2)
def test_gathers_overlap_the_compute_of_the_unit_before(rank: int) -> None:
    """Check that no unit's compute waits for the gather of the next unit."""
    plan = Plan.by_hand(microbatch_sizes=[1, 1], state_shares=[0.25, 0.75])
    accelerator = Accelerator()
    over: dict[FSDPUnit, int] = {}  # number of the last operation of its gather
    begun: list[str] = []

    def launch(unit: FSDPUnit) -> None:
        unit.unshard()
        stream = model._comm.all_gather_stream
        over[unit] = stream.clock.get(stream.number, 0)

    def begin(unit: FSDPUnit) -> None:
        unit.wait_for_unshard()
        stream = model._comm.all_gather_stream
        assert accelerator.current.clock.get(stream.number, 0) == over[unit], unit.fqn
        begun.append(unit.fqn)

    with (
        accelerator.installed(),
        mock.patch.dict(RUNS, {GATHER: Handling(launch, begin, Activity.WAIT_GATHER)}),
    ):
        module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
        model = HetFSDP(module, plan, units=[nn.Linear], device=accelerator.device)
        x = torch.ones(1, 2, device=accelerator.device)
        model.backward(model(x).sum(), 1)
    assert begun == ["", "0", "1", "2", "1", "0"]


def _reads(rank: int, on_bad_step: OnBadStep) -> list[str]:
    plan = Plan.by_hand(microbatch_sizes=[1, 1], state_shares=[0.25, 0.75])
    with Accelerator().installed() as accelerator:
        trainer = make_trainer(plan, torch.float32, device=accelerator.device)
        trainer.guard = BadStepGuard(on_bad_step=on_bad_step)
        trainer.train_step()
        trainer.train_step()
        accelerator.syncs.clear()
        trainer.train_step()
        return list(accelerator.syncs)


def test_the_host_waits_for_the_loss_and_for_the_norm_only_where_it_decides() -> None:
    read = "comm/calls.py read: event"
    for syncs in run_ranks(_reads, 2, OnBadStep.STOP):
        assert syncs == [read]  # by then the norm of the step before is there
    for syncs in run_ranks(_reads, 2, OnBadStep.SKIP):
        assert syncs == [read] * 2


def test_the_host_waits_once_for_the_statistics_of_all_batch_norms() -> None:
    with Accelerator().installed() as accelerator:
        layers = [(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)]
        module = nn.Sequential(*(layer for pair in layers for layer in pair)).double()
        plan = Plan.by_hand(microbatch_sizes=[3], num_microbatches=[2])
        model = HetFSDP(module, plan, device=accelerator.device, units=[nn.Linear])
        batch = torch.randn(6, 4, dtype=torch.float64).to(accelerator.device)
        for _ in range(2):
            accelerator.syncs.clear()
            model.backward(model(batch).square().sum(), 6)
        assert accelerator.syncs == ["comm/calls.py read: event"] * 2  # and for the loss


def _reads_of_worker(rank: int, path: str) -> list[tuple[list[str], int]]:
    """The reads of each step of a run, and the events that it times."""
    folder = RunFolder(Path(path))
    env = RankEnv(rank=rank, world_size=2, local_rank=rank, store_host="", store_port=0)
    with Accelerator().installed() as accelerator:
        run = Run(folder.load_config(), folder, env, accelerator.device)
        seen = []
        with run.in_training(RankConsole(quiet=True)):
            for _ in range(6):
                accelerator.syncs.clear()
                timed = accelerator.host.num_timed
                run.take_step()
                seen.append((list(accelerator.syncs), accelerator.host.num_timed - timed))
        return seen


def test_a_training_rank_reads_once_a_step_and_times_what_is_reported(tmp_path: Path) -> None:
    """Step 4 is reported, and step 6 is the last: the norm is read in the step itself."""
    quick = ("debug=quick", "num_steps=6", "log_every=4", "data.num_eval_samples=2")
    path = configure(tmp_path, *SMALL_MODEL, *quick, "cluster.num_ranks=2")
    read = "comm/calls.py read: event"
    for seen in run_ranks(_reads_of_worker, 2, path):
        reads, num_timed = zip(*seen, strict=True)
        assert reads[1:3] == ([read],) * 2
        assert reads[3] == reads[4] + [read]
        assert reads[4] == [read]
        assert [number > 0 for number in num_timed] == [False] * 3 + [True, False, True]
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [each["step"] for each in steps if "loss" in each] == [1, 2, 3, 4, 5, 6]
    assert all(each["grad_norm"] > 0 for each in steps if "loss" in each)


@on_ranks(2)
def test_a_gradient_that_is_being_reduced_is_not_freed(rank: int) -> None:
    """A step ends while a reduction is in flight; the next one is as if it had not begun."""
    plan = Plan.by_hand(microbatch_sizes=[1, 1], state_shares=[0.25, 0.75])
    with Accelerator().installed() as accelerator:
        module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        model = HetFSDP(module, plan, units=[nn.Linear], device=accelerator.device)
        x = torch.randn(1, 8).to(accelerator.device)
        means = [model.backward(model(x).sum(), 1)]
        output = model(x)
        for unit in model._runtime.units[1:]:
            unit.begin_backward()
            unit.reduce()
        for unit in model._runtime.units:
            unit.drop_grads()
            unit.reshard()
        del output
        torch.zeros(64, device=x.device)  # in memory that was freed
        return means


class _Greedy(nn.Linear):
    is_full = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(x)


def _out_of_memory(rank: int) -> None:
    plan = Plan.by_hand(microbatch_sizes=[1, 2], state_shares=[0.25, 0.75])
    with (
        Accelerator().installed() as accelerator,
        mock.patch.object(progress, "predicted_bytes", 20 * 2**30),
    ):
        module = nn.Sequential(nn.Linear(8, 8), _Greedy(8, 8))
        model = HetFSDP(module, plan, units=[nn.Linear, _Greedy], device=accelerator.device)
        x = torch.randn(rank + 1, 8).to(accelerator.device)
        model.backward(model(x).sum(), 1)
        accelerator.memory.peak_bytes = 22 * 2**30
        module[1].is_full = rank == 1
        model(x)


def test_out_of_memory_ends_all_ranks_with_unit_bytes_and_the_plan_to_make() -> None:
    peer, failed = run_ranks_expecting_failure(_out_of_memory, 2)
    assert failed.exception_name == "OutOfMemoryError"
    for words in (
        "forward of unit '1': OutOfMemoryError: CUDA out of memory.",
        " At most 22.00 GiB were allocated here, ",
        "and 20.00 GiB were predicted. Plan again with limits.1.memory_gib=16.50.",
    ):
        assert words in peer.message


# The detector itself


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with Accelerator().installed() as accelerator:
        yield accelerator


def _written_late(accelerator: Accelerator) -> tuple[Any, Any, Tensor]:
    module = accelerator.module()
    main, side = module.current_stream(), module.Stream()
    x = torch.zeros(8, device=accelerator.device)
    side.wait_stream(main)
    with module.stream(side):
        x.add_(1)
    return main, side, x


def test_a_read_that_waits_for_nobody_is_a_race(accelerator: Accelerator) -> None:
    _main, _side, x = _written_late(accelerator)
    with pytest.raises(RaceError, match="add_"):
        x.sum()


def test_an_event_covers_only_what_came_before_it(accelerator: Accelerator) -> None:
    main, side, x = _written_late(accelerator)
    event = side.record_event()
    with accelerator.stream(side):
        x.add_(1)
    main.wait_event(event)
    with pytest.raises(RaceError):
        x.sum()


@pytest.mark.parametrize("frees", [lambda x: x.untyped_storage().resize_(0), lambda x: None])
def test_freed_memory_is_not_used_before_its_readers_are_done(
    accelerator: Accelerator, frees: Callable[[Tensor], Any]
) -> None:
    main, side, x = _written_late(accelerator)
    frees(x)
    del x
    with pytest.raises(RaceError, match="freed"):
        torch.zeros(8, device=accelerator.device)
    main.wait_stream(side)
    torch.zeros(8, device=accelerator.device)


def test_the_host_reads_no_copy_that_is_on_its_way(accelerator: Accelerator) -> None:
    x = torch.zeros(8, device=accelerator.device)
    copied = x.to("cpu", non_blocking=True)
    with pytest.raises(RaceError, match="on its way"):
        copied.tolist()
    accelerator.module().synchronize()
    assert copied.tolist() == [0.0] * 8


def _send_without_waiting(rank: int) -> str:
    """A rank that only sends must not free what it sends."""
    accelerator = Accelerator()
    with accelerator.installed():
        communicators = Communicators.over(default_group(None), accelerator.device)
        channel = Channel(communicators.gather, (0, 1), rank)
        shard = torch.ones(4 * (rank == 0), device=accelerator.device)
        output = torch.empty(4, device=accelerator.device) if rank else None
        gather = all_gather_uneven(output, shard, [4, 0], channel=channel, receivers=[1])
        try:
            shard += 1
        except RaceError as error:
            found = str(error)
        else:
            found = "nothing"
        gather.wait()
        shard += 1
        return found


def test_a_message_is_read_until_it_is_waited_for() -> None:
    found = run_ranks(_send_without_waiting, 2)
    assert "messages" in found[0]
    assert found[1] == "nothing"


# A whole module, host and all


class _WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.table(tokens) * self.scale
        for block in self.blocks:
            x = x + block(x).tanh()
        return x.square().sum(), torch.tensor(tokens.numel(), device=tokens.device)


@pytest.mark.parametrize("is_on_meta", [False, True])
@pytest.mark.parametrize("world_size", one_in(2, [3, 2]))
@on_ranks()
def test_what_surrounds_a_step_is_in_order_too(
    rank: int, world_size: int, is_on_meta: bool
) -> None:
    """Hooks, clipping, whole state dicts, evaluation, calls one by one, another plan; of a
    module of the host, with its buffers, or of one without values.
    """
    batches = [4, 2, 0][:world_size]
    shares = [0.0, 0.75, 0.25] if world_size == 3 else [0.25, 0.75]
    plan, other = (
        Plan.by_hand(
            microbatch_sizes=[2, 1, 1][:world_size],
            rank_batch_sizes=batches,
            state_shares=each,
        )
        for each in (shares, shares[::-1])
    )
    accelerator = Accelerator()
    found: list[list[Any]] = []
    for device in (accelerator.device, torch.device("cpu")):
        torch.manual_seed(5)
        module = _WithBuffers()
        if is_on_meta:
            module.to("meta")
        else:
            module.blocks[1].weight.register_hook(lambda grad: 2 * grad)
        generator = torch.Generator().manual_seed(7)
        batch = {"tokens": torch.randint(0, 7, (sum(batches), 3), generator=generator)}
        mine = part_of(batch, batches, rank)
        with accelerator.installed() if device.index is not None else nullcontext():
            tokens = mine["tokens"].to(device)
            options: dict[str, Any] = {"init_fn": _fill} if is_on_meta else {}
            model = HetFSDP(module, plan, device=device, param_dtype=torch.float32, **options)
            optimizer = torch.optim.AdamW(model.parameters())
            seen: list[Any] = []
            for _ in range(2):
                seen.append(model.backward(*model(tokens)))
                seen.append(model.clip_grad_norm_(0.1))
                optimizer.step()
                optimizer.zero_grad()
                model.eval()
                with torch.no_grad():
                    seen.append(model(tokens)[0])
                model.train()
                whole = model.state_dict()
                seen += [whole[name] for name in sorted(whole)]
                doubled = {name: 2 * each for name, each in whole.items()}
                model.load_state_dict(None if rank else doubled)
                with torch.no_grad(), model.unit_by_unit():
                    for _ in range(1 + rank):
                        seen.append(model.module(tokens)[0])
                seen += [each for unit in model.gather_units() for each in unit.values()]
                redistribute(model, optimizer, plan if model.plan == other else other)
            seen += [param.detach().clone() for param in model.parameters()]
        found.append([e.as_subclass(Tensor) if isinstance(e, Tensor) else e for e in seen])
    for there, here in zip(*found, strict=True):
        torch.testing.assert_close(there, here)


@on_ranks(2)
def test_the_middle_of_a_step_is_in_order_too(rank: int) -> None:
    """Evaluation, calls one by one, written parameters and whole state dicts between rounds."""
    plan = Plan.by_hand(
        microbatch_sizes=[2, 1],
        num_rounds=2,
        reshard_after_forward=False,
        reshard_after_backward=False,
        reduce_each_round=False,
    )
    accelerator = Accelerator()
    found: list[list[Any]] = []
    for device in (accelerator.device, torch.device("cpu")):
        torch.manual_seed(5)
        module = _WithBuffers()
        generator = torch.Generator().manual_seed(7)
        batch = torch.randint(0, 7, (6, 3), generator=generator)
        with accelerator.installed() if device.index is not None else nullcontext():
            model = HetFSDP(module, plan, device=device)
            seen: list[Any] = []
            for i in (0, 1, 0, 1):
                mine = plan.round_samples(model.position, i)
                tokens = batch[mine.start : mine.stop].to(device)
                seen.append(model.backward(*model(tokens)))
                with torch.no_grad():
                    seen.append(model(tokens)[0])
                    with model.unit_by_unit():
                        seen.append(model.module(tokens)[0])
                    for param in model.parameters():
                        param.mul_(0.9)
                seen += [each.clone() for each in model.module.state_dict().values()]
            seen += [param.grad.clone() for param in model.parameters()]
        found.append([e.as_subclass(Tensor) if isinstance(e, Tensor) else e for e in seen])
    for there, here in zip(*found, strict=True):
        torch.testing.assert_close(there, here)


def _fill(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.data.uniform_(-1, 1)
