"""A unit run alone does what training makes it do: it adds to gradients that are there."""

import pytest
import torch
from torch import Tensor, nn

from shardhet.profiler.batch import ExampleBatch, TrainedModel
from shardhet.profiler.model_spec import trace_model
from shardhet.profiler.stopwatch import Stopwatch
from shardhet.profiler.unit_runner import MAX_MICROBATCHES, UnitRunner

CPU = torch.device("cpu")
NUM_ROWS = 12


class Layer(nn.Module):
    """Takes a table that has no batch, and whose length may be the batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x_BTD: Tensor, table_TD: Tensor) -> Tensor:
        y: Tensor = self.linear(x_BTD + table_TD)
        return y


class Model(nn.Module):
    """Two units alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x_BTD: Tensor) -> Tensor:
        table_TD = torch.ones(NUM_ROWS, 4)
        for layer in self.layers:
            x_BTD = layer(x_BTD, table_TD)
        return x_BTD


def make_runner(
    *, max_samples: int, reduce_dtype: torch.dtype | None = None
) -> tuple[UnitRunner, nn.Parameter]:
    torch.manual_seed(0)
    model = TrainedModel(
        module=Model(),
        batch=ExampleBatch(args=(torch.rand(1, NUM_ROWS, 4),)),
        units=[Layer],
        param_dtype=torch.float32,
        reduce_dtype=reduce_dtype,
    )
    sketch = trace_model(model)
    runner = UnitRunner(
        model,
        sketch.units[0],
        device=CPU,
        max_samples=max_samples,
        stopwatch=Stopwatch(CPU),
    )
    param = runner._module.get_parameter("layers.0.linear.weight")
    assert isinstance(param, nn.Parameter)
    return runner, param


def test_every_microbatch_adds_to_the_gradient_of_those_before() -> None:
    runner, weight = make_runner(max_samples=4)
    assert all(seconds > 0 for seconds in runner.run(4))
    assert weight.grad is not None
    first, address = weight.grad.clone(), weight.grad.data_ptr()
    runner.run(4)
    torch.testing.assert_close(weight.grad, 2 * first)
    assert weight.grad.data_ptr() == address


def test_gradients_of_another_dtype_are_added_up_in_that() -> None:
    runner, weight = make_runner(max_samples=4, reduce_dtype=torch.float64)
    runner.run(4)
    assert weight.grad is None  # it was added and is gone


@pytest.mark.parametrize("num_microbatches", [2, 3, NUM_ROWS])
def test_a_visit_of_several_microbatches_computes_what_one_of_all_does(
    num_microbatches: int,
) -> None:
    # As many samples as the table has rows, so that the one must not be taken for the other.
    runner, weight = make_runner(max_samples=NUM_ROWS)
    runner.run(NUM_ROWS)
    assert weight.grad is not None
    whole = weight.grad.clone()
    weight.grad = None
    case = runner.forward(NUM_ROWS // num_microbatches, num_microbatches)
    assert case.microbatch_sizes == (NUM_ROWS // num_microbatches,) * num_microbatches
    forward_s, backward_s = runner.backward(case)
    assert forward_s > 0
    assert backward_s > 0
    torch.testing.assert_close(weight.grad, whole)


def test_small_microbatches_are_run_several_at_a_time() -> None:
    runner, _ = make_runner(max_samples=NUM_ROWS)
    counts = [runner.num_microbatches(size) for size in (1, 2, 5, 7, 12)]
    assert counts == [MAX_MICROBATCHES, 2, 2, 1, 1]
    forward_s, backward_s = runner.backward(runner.forward(3, 4))
    assert forward_s > 0
    assert backward_s > 0
