"""Numbers that a model draws outside of units: nothing may depend on them, or it is refused."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shardhet import HetFSDP, Plan
from shardhet.fsdp.microbatch.surroundings import HIGH, LOW, MIDDLE, HostGenerators
from tests.edge_plans import plan_for
from tests.small_models import NUM_SAMPLES, WIDTH, Mixer, Net, draw
from tests.worlds import run_ranks


@pytest.mark.parametrize(("word", "number"), [(LOW, 0.0), (MIDDLE, 0.5), (HIGH, 1.0)])
def test_the_next_numbers_are_near_those_wanted(word: int, number: float) -> None:
    generators = HostGenerators()
    with generators.restored():
        generators.begin(word)
        assert generators.drawn() == []
        for _ in range(200):
            assert random.random() == pytest.approx(number, abs=1e-8)
        assert generators.drawn() == ["Python's random"]
        for _ in range(200):
            assert draw_by_numpy() == pytest.approx(number, abs=1e-8)
        assert generators.drawn() == ["Python's random", "NumPy's random"]
        for _ in range(100):  # loops that wait for another number end
            random.gauss(0, 1)
            np.random.normal()  # noqa: NPY002


def draw_by_torch() -> Any:
    return torch.rand(())


def draw_an_item() -> float:
    return torch.rand(()).item()


def draw_by_python() -> float:
    return random.uniform(0, 1)


def draw_by_numpy() -> float:
    return float(np.random.random())  # noqa: NPY002 -- as models draw


class Skipping(Net):
    """Leaves out a unit, or a part of one, where what it draws lies between two numbers."""

    def __init__(
        self, draw: Callable[[], Any], low: float, high: float, *, is_inside: bool = False
    ) -> None:
        super().__init__(Mixer)
        self.draw, self.low, self.high = draw, low, high
        self.is_inside = is_inside
        if is_inside:
            self.units[0].register_forward_hook(lambda _, args, y: y * 2 if self.skips() else y)

    def skips(self) -> bool:
        drawn = self.draw()
        return bool(drawn < self.high) and not bool(drawn < self.low)

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            if self.is_inside or not self.skips():
                x = unit(x)
        return self.head(x)


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("draw_one", [draw_by_python, draw_by_numpy])
@pytest.mark.parametrize(("low", "high"), [(0.0, 0.1), (0.3, 0.6), (0.9, 1.0)])
def test_a_model_that_depends_on_draws_of_the_host_is_refused(
    draw_one: Callable[[], Any], low: float, high: float, is_inside: bool
) -> None:
    module = Skipping(draw_one, low, high, is_inside=is_inside)
    model = HetFSDP(module, plan_for(recomputes=False))
    name = "Python" if draw_one is draw_by_python else "NumPy"
    with pytest.raises(ValueError, match=f"draws from {name}'s random, and what it computes"):
        model(draw(NUM_SAMPLES, 3, WIDTH))


@pytest.mark.parametrize("draw_one", [draw_by_torch, draw_by_python, draw_by_numpy])
def test_a_model_may_draw_what_nothing_depends_on(draw_one: Callable[[], Any]) -> None:
    plain = Skipping(draw_one, 0.0, 0.0)
    model = HetFSDP(copy.deepcopy(plain), plan_for(recomputes=True))
    x = draw(NUM_SAMPLES, 3, WIDTH)
    following = []
    for each in (plain, model):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        output = each(x)
        following.append((draw_by_python(), draw_by_numpy()))
        torch.testing.assert_close(output, plain(x), rtol=1e-12, atol=1e-14)
    assert following[0] == following[1]  # the probe has drawn nothing


@pytest.mark.parametrize("draw_one", [draw_by_torch, draw_an_item])
def test_layers_that_are_skipped_by_torchs_draws_are_refused(
    draw_one: Callable[[], Any],
) -> None:
    model = HetFSDP(Skipping(draw_one, 0.0, 0.1), plan_for(recomputes=False))
    with pytest.raises(ValueError, match="perhaps layers skipped at random"):
        model(draw(NUM_SAMPLES, 3, WIDTH))


def skip_beside_a_rank_without_samples(rank: int, high: float) -> str:
    plan = Plan.by_hand(microbatch_sizes=[2, 0], state_shares=[0.5, 0.5])
    torch.manual_seed(0)
    model = HetFSDP(Skipping(draw_by_python, 0.0, high), plan)
    x = draw(2, 3, WIDTH)
    try:
        model(x[: 2 - 2 * rank])
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "right"


@pytest.mark.parametrize("high", [0.0, 0.5])
def test_draws_are_tried_on_all_ranks(high: float) -> None:
    for said in run_ranks(skip_beside_a_rank_without_samples, 2, high, fresh_world=True):
        assert (said == "right") if not high else ("draws from Python's random" in said), said
