"""``describe``: the units that HetFSDP makes of a model, counted without the model's memory."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardhet.models.decoder import Decoder, DecoderConfig
from shardhet.planner import PlanError, find_plan
from shardhet.pricing.derive import derive_profile
from shardhet.pricing.scenario import Scenario
from shardhet.profiler.batch import ExampleBatch
from shardhet.profiler.counting import MAX_COUNTS, LiveBytes, steady
from shardhet.profiler.describe import as_example, describe, plan_for
from shardhet.records.cluster import Cluster, DeviceSpec, Node
from shardhet.records.kinds import built_in_kinds
from shardhet.records.plan import Plan
from shardhet.records.workload import Unit, Workload
from tests.selection import one_in
from tests.worlds import run_ranks, run_ranks_expecting_failure

TINY = {
    "vocab_size": 256,
    "width": 128,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_width": 320,
    "seq_len": 64,
}


def decoder(shape: dict[str, int], dtype: torch.dtype = torch.float32) -> Decoder:
    with torch.device("meta"):
        return Decoder(DecoderConfig(**shape)).to(dtype)  # type: ignore[arg-type]


def text(seq_len: int, num_samples: int = 1) -> ExampleBatch:
    tokens_BT = torch.zeros(num_samples, seq_len, dtype=torch.long)
    return ExampleBatch(args=(tokens_BT, tokens_BT))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "changes",
    one_in(
        2,
        [
            {},
            {"num_kv_heads": 4},
            {"vocab_size": 50304},
            {"width": 512, "hidden_width": 1024},  # few logits beside the width
            {"seq_len": 7},
        ],
    ),
    ids=str,
)
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_the_analytic_decoder_is_what_is_counted(
    changes: dict[str, int], param_dtype: str
) -> None:
    shape = TINY | changes
    in_flight = None if param_dtype == "float32" else torch.bfloat16
    counted = describe(decoder(shape), text(shape["seq_len"]), param_dtype=in_flight)
    assert counted == Workload.transformer(
        **shape,  # type: ignore[arg-type]
        param_dtype=param_dtype,
    )


class Masked(nn.Module):
    """Blocks that are called with a mask, which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Adds(), Adds()

    def forward(self, rows: Tensor) -> Any:
        mask = torch.ones(len(rows), 16)
        found = self.last(self.first(rows, mask), mask)
        return found.sum(), len(rows)


class Adds(nn.Module):
    """A unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, rows: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = self.linear(rows) + mask.mean(1, keepdim=True)
        return found


def test_inputs_without_gradient_are_told_from_those_that_have_one() -> None:
    counted = describe(Masked(), ExampleBatch(args=(torch.rand(1, 4),)), units=[Adds])
    kinds = [counted.kind_of(unit) for unit in counted.units if unit.fqn]
    assert [kind.input_bytes for kind in kinds] == [80, 80]
    assert [kind.input_grad_bytes for kind in kinds] == [0, 16]


def test_double_precision_is_counted_too() -> None:
    counted = describe(decoder(TINY, torch.float64), text(64))
    assert counted == Workload.transformer(
        **TINY,  # type: ignore[arg-type]
        param_dtype="float64",
        reduce_dtype="float64",
        state_bytes_per_element=32,
    )


def test_a_model_with_memory_is_left_as_it_is() -> None:
    model = Decoder(DecoderConfig(**(TINY | {"num_layers": 1})))  # type: ignore[arg-type]
    before = {name: param.clone() for name, param in model.named_parameters()}
    assert describe(model, text(64, 3)) == describe(decoder(TINY | {"num_layers": 1}), text(64))
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name])
        assert param.grad is None
    model(*text(64).args)  # no hook is left that would count


class Foreign(nn.Module):
    """Tied embedding and projection, a norm that no unit wants, logits and no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)])
        self.norm = nn.LayerNorm(16)
        self.scale = nn.Parameter(torch.ones(1))
        self.out = nn.Linear(16, 50, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT) * self.scale
        for layer in self.layers:
            x = torch.relu(layer(x))
        logits: Tensor = self.out(self.norm(x))
        return logits


def token_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss, (targets >= 0).sum()


def test_tied_units_losses_from_outside_and_the_root_are_counted() -> None:
    tokens = torch.zeros(2, 5, dtype=torch.long)
    batch = ExampleBatch(args=(tokens,), loss_inputs=(tokens,))
    model = Foreign()
    with_loss = describe(model, batch, loss_fn=token_loss)
    without = describe(model, batch)
    assert with_loss.units == (
        Unit(fqn="embed", kind="embedding"),  # and out, which shares its weight
        Unit(fqn="layers.0", kind="linear"),
        Unit(fqn="layers.1", kind="linear"),
        Unit(fqn="layers.2", kind="linear"),
        Unit(fqn="norm", kind="layer_norm"),
        Unit(fqn="", kind="root"),
    )
    tied = with_loss.kind_of(with_loss.units[0])
    assert tied.param_shapes == ((50, 16),)
    assert tied.forward_flops == 2 * 5 * 16 * 50
    bare = without.kind_of(without.units[0])
    # The loss keeps log-probabilities that the model alone does not.
    assert tied.activation_bytes >= bare.activation_bytes + 5 * 50 * 4
    assert with_loss.numel == sum(param.numel() for param in model.parameters())


class BatchInDimOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.transpose(0, 1)).transpose(0, 1)
        return x


def test_units_with_the_batch_elsewhere_are_counted() -> None:
    workload = describe(BatchInDimOne(), ExampleBatch(args=(torch.zeros(5, 7, 4),)))
    assert workload.kinds[0].forward_flops == 2 * 7 * 4 * 4


def test_an_empty_example_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no sample"):
        ExampleBatch(args=(torch.zeros(0, 3),))


def test_live_bytes_are_those_that_are_not_freed() -> None:
    x = torch.ones(1000)
    with LiveBytes() as live:
        y = x * 2
        z = y.view(10, 100)
        w = y + 1
        del y
        assert live.live_bytes == 8000
        del z
        assert live.live_bytes == 4000
        x.add_(w)  # nothing new
        del w
    assert (live.live_bytes, live.peak_bytes) == (0, 8000)


@pytest.mark.parametrize(
    ("counts", "expected"), [([5, 5], 5), ([7, 5, 5], 5), ([5, 9, 5, 5], 5)]
)
def test_a_count_that_another_thread_has_disturbed_is_made_again(
    counts: list[int], expected: int
) -> None:
    left = iter(counts)
    assert steady(lambda: next(left)) == expected
    assert next(left, None) is None


def test_a_count_that_is_never_steady_ends() -> None:
    numbers = iter(range(100))
    assert steady(lambda: next(numbers)) == MAX_COUNTS - 1


NODES = (
    Node(
        host="a",
        devices=(DeviceSpec(kind="NVIDIA GeForce RTX 4090", memory_capacity_bytes=2**34),),
    ),
)


def test_a_model_a_batch_and_a_cluster_make_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "version: 1\nnodes:\n  - host: a\n"
        "    link: {latency_s: 2.0e-5, bandwidth_bytes_per_s: 12.0e+9}\n"
        "    devices: [{kind: NVIDIA GeForce RTX 4090}, {kind: NVIDIA GeForce RTX 3060}]\n"
    )
    tokens = torch.zeros(2, 64, dtype=torch.long)
    plan = plan_for(
        decoder(TINY), (tokens, tokens), path, global_batch_size=24, param_dtype=torch.bfloat16
    )
    workload = describe(decoder(TINY), text(64), param_dtype=torch.bfloat16)
    cluster = Cluster.load(path)
    scenario = Scenario(cluster, workload, derive_profile(cluster, workload))
    assert plan == scenario.named(find_plan(scenario, global_batch_size=24))
    assert as_example(tokens) == ExampleBatch(args=(tokens,))
    assert as_example({"input_ids": tokens}) == ExampleBatch(kwargs={"input_ids": tokens})


def _plans(rank: int, fails: bool) -> tuple[str, list[int]]:
    """A plan as this rank gets it twice, and the batches that it has planned for."""
    planned: list[int] = []

    def plan(scenario: Scenario, *, global_batch_size: int) -> Plan:
        planned.append(global_batch_size)
        if fails:
            raise PlanError("no plan fits")
        return find_plan(scenario, global_batch_size=global_batch_size)

    with mock.patch("shardhet.planner.find_plan", plan):
        model, tokens = decoder(TINY), torch.zeros(2, 64, dtype=torch.long)
        found = [
            plan_for(
                model, (tokens, tokens), "rtx4090_2x3090", global_batch_size=24 + 8 * fails
            )
            for _ in range(2)
        ]
    assert found[0] == found[1]
    return found[0].to_json(), planned


def test_rank_zero_plans_once_for_all_ranks() -> None:
    (mine, planned), *others = run_ranks(_plans, 3, False)
    assert planned == [24]
    assert others == [(mine, [])] * 2


def test_a_plan_that_rank_zero_cannot_make_ends_all_ranks_with_its_reason() -> None:
    outcomes = run_ranks_expecting_failure(_plans, 3, True)
    assert [each.exception_name for each in outcomes] == ["PlanError", *["RuntimeError"] * 2]
    for each in outcomes:
        assert "no plan fits" in each.message
        assert each.is_within(5.0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"model": torch.relu}, "is no module"),
        ({"model": nn.Sequential(nn.Linear(2, 2)).requires_grad_(False)}, "are frozen"),
        ({"model": nn.Linear(2, 2)}, "units: the model has none"),
        ({"batch": None}, "batch: None is no example"),
        ({"param_dtype": "bfloat16"}, "param_dtype is 'bfloat16' but must be"),
        ({"global_batch_size": 4.0}, "global_batch_size is 4.0 but must be a whole number"),
        ({"cluster": Cluster(nodes=NODES)}, "4090' but does not describe it"),
    ],
)
def test_what_plans_are_not_made_of_is_refused_by_name(
    wrong: dict[str, Any], words: str
) -> None:
    given: dict[str, Any] = {
        "model": nn.Sequential(nn.Linear(2, 2)),
        "batch": torch.rand(2, 2),
        "cluster": Cluster(nodes=NODES, kinds=tuple(built_in_kinds().values())),
        "global_batch_size": 4,
    }
    with pytest.raises((TypeError, ValueError), match=words):
        plan_for(**given | wrong)


class Adapted(nn.Module):
    """A matrix of bytes that stays as it is, beside one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        packed = torch.zeros(64, 64, dtype=torch.uint8, device="meta")
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.frozen = nn.Linear(64, 64, device="meta", dtype=torch.bfloat16).requires_grad_(
            False
        )
        self.adapter = nn.Linear(64, 64, bias=False, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.adapter(x) + x @ self.packed.to(x.dtype)


def test_frozen_parameters_count_as_they_are_stored() -> None:
    model = nn.Sequential(Adapted(), Adapted())
    workload = describe(
        model, as_example(torch.rand(2, 64)), units=[Adapted], param_dtype=torch.bfloat16
    )
    kind = workload.kinds[0]  # the second also has a gradient of its input
    bias, matrix = 64, 64 * 64
    assert kind.trained_numel == matrix
    assert workload.gathered_bytes(kind) == matrix + 2 * (2 * matrix + bias)
    stored = matrix + 2 * (matrix + bias) + 16 * matrix  # bytes, bfloat16, float32 with Adam
    assert workload.state_bytes_per_element * kind.numel == pytest.approx(stored)
    assert kind.frozen_as_stored
    in_half = describe(
        model, as_example(torch.rand(2, 64)), units=[Adapted], param_dtype=torch.float16
    )
    assert not in_half.kinds[0].frozen_as_stored
    assert Workload.from_json(workload.to_json()) == workload
