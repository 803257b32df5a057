"""What is alive in each turn, and that no moment that may be the fullest is left out."""

import random

import numpy as np
import pytest

from shardhet.pricing.step_cost import Moments
from shardhet.records.schedule import StepForm
from shardhet.records.schedule.held import held_units


def by_turn(form: StepForm) -> list[tuple[str, str, str]]:
    """Of units a, b, c: whose parameters, whole gradients and rows are alive."""
    held = held_units(3, form)

    def names(numbers: list[int]) -> str:
        return "".join(unit * number for unit, number in zip("abc", numbers, strict=True))

    return [
        (names(unsharded), names(grads), names(rows))
        for unsharded, grads, rows in zip(
            held.unsharded.tolist(), held.grads.tolist(), held.num_rows.tolist(), strict=True
        )
    ]


def test_neighbours_are_gathered_and_two_gradients_are_whole() -> None:
    assert by_turn(StepForm()) == [
        ("ab", "", ""),
        ("bc", "", ""),
        ("c", "", ""),
        ("bc", "c", ""),
        ("ab", "bc", "c"),
        ("a", "ab", "bc"),
    ]
    kept = by_turn(StepForm(reshard_after_forward=False))
    assert [unsharded for unsharded, _, _ in kept] == ["ab", "abc", "abc", "abc", "ab", "a"]


def test_a_reduction_goes_on_beside_the_next_round() -> None:
    one_round = by_turn(StepForm())
    later = by_turn(StepForm(num_rounds=2))
    assert later[:6] == one_round
    assert [(grads, rows) for _, grads, rows in later[6:]] == [
        *[("a", "abc")] * 3,
        ("ac", "abc"),
        ("bc", "abcc"),  # the round before it has rows already
        ("ab", "abbc"),
    ]
    held = held_units(3, StepForm(num_rounds=2))
    assert held.last_grads.tolist() == [True, False, False]


def test_gradients_that_wait_for_the_last_round_are_whole() -> None:
    form = StepForm(num_rounds=3, reduce_each_round=False)
    assert [grads for _, grads, _ in by_turn(form)] == [
        *["", "", "", "c", "bc", "abc"],
        *["abc"] * 6,
        *["abc"] * 3,
        *["abc", "abc", "ab"],
    ]


def test_rounds_between_the_first_and_the_last_are_alike() -> None:
    three, many = (held_units(4, StepForm(num_rounds=n)) for n in (3, 9))
    assert (three.num_rows == many.num_rows).all()
    assert (three.grads == many.grads).all()


@pytest.mark.parametrize("seed", range(20))
def test_the_fullest_moments_are_kept(seed: int) -> None:
    draw = random.Random(f"moments {seed}")
    number = draw.randint(1, 40)

    def some(most: int) -> np.ndarray:
        """Values in runs that rise or fall by the same steps."""
        values, value, step = [], draw.randint(0, most), 0
        for _ in range(number):
            if draw.random() < 0.2:
                value, step = draw.randint(0, most), draw.randint(-2, 2)
            value = max(0, value + step)
            values.append(float(value))
        return np.array(values)

    moments = Moments(
        unsharded_bytes=some(9),
        grad_bytes=some(9),
        input_bytes=some(9),
        graph_bytes=some(9),
        numel_bytes=1 + some(9),
        pending_bytes=some(3),
        runs=tuple(sorted(draw.choice([-1, 0, 1]) for _ in range(number))),
    )
    running = np.array([draw.randint(0, 9), draw.randint(0, 9), 0.0])
    fullest = moments.fullest()
    assert 0 < len(fullest.runs) <= number

    def most(of: Moments, batch: int, stored: int) -> float:
        own = of.fixed_bytes + running[list(of.runs)] + batch * of.sample_bytes
        return float((own + stored * of.numel_bytes).max())

    for batch, stored in ((0, 0), (1, 0), (0, 1), (3, 1), (1, 3), (50, 7), (7, 50)):
        assert most(fullest, batch, stored) == pytest.approx(most(moments, batch, stored))
