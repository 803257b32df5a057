"""What a plan may say, how it is written by hand and to a file, and what is refused."""

import copy
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardhet.records.cluster import DeviceSpec
from shardhet.records.plan import EVERY_UNIT, HoldsFor, Plan, PlannedUnit, RankPlan
from shardhet.records.stages import Stage

Json = Any

WHOLE = Plan(
    ranks=(
        RankPlan(
            microbatch_sizes=(4, 4, 3),
            state_share=0.5,
            recomputed_units=("blocks.*", "head"),
            device=DeviceSpec(host="a", kind="NVIDIA T4", memory_capacity_bytes=2**34),
        ),
        RankPlan(microbatch_sizes=(), state_share=0.5, device=DeviceSpec(uuid="GPU-7")),
        RankPlan(microbatch_sizes=(1,), state_share=0.0, recomputed_units=EVERY_UNIT),
    ),
    units=(PlannedUnit(fqn="blocks.0", numel=96), PlannedUnit(fqn="", numel=0)),
    reshard_after_forward=False,
)


def sizes(plan: Plan) -> list[tuple[int, ...]]:
    return [rank.microbatch_sizes for rank in plan.ranks]


# By hand


def test_batch_sizes_alone_are_a_plan() -> None:
    assert Plan.by_hand(microbatch_sizes=[2, 2, 2, 15]).state_shares == (0.25,) * 4
    devices = [DeviceSpec(memory_capacity_bytes=size * 2**30) for size in (24, 12, 12)]
    plan = Plan.by_hand(microbatch_sizes=[4, 2, 0], devices=devices)
    assert plan.state_shares == (0.5, 0.25, 0.25)
    unlike = [*devices[:2], DeviceSpec(kind="of unknown memory")]
    plan = Plan.by_hand(microbatch_sizes=[4, 2, 0], devices=unlike)
    assert plan.state_shares == (1 / 3,) * 3


def test_recomputed_units_are_patterns_on_whole_names() -> None:
    rank = RankPlan(
        microbatch_sizes=(1,), state_share=1.0, recomputed_units=("blocks.?", "Head")
    )
    claimed = [fqn for fqn in ("blocks.3", "blocks.10", "head", "Head") if rank.recomputes(fqn)]
    assert claimed == ["blocks.3", "Head"]


@given(st.integers(0, 40), st.lists(st.integers(1, 7), max_size=5))
def test_any_batch_can_be_split_into_no_larger_microbatches(
    num_samples: int, planned: list[int]
) -> None:
    rank = RankPlan(microbatch_sizes=tuple(planned), state_share=1.0)
    split = rank.split(num_samples)
    assert sum(split) == num_samples
    assert all(0 < size <= max(planned, default=num_samples) for size in split)
    assert num_samples != rank.rank_batch_size or split == rank.microbatch_sizes


# Even and proportional


# What a plan must not say


def by_hand(**changes: Any) -> Plan:
    stated: dict[str, Any] = {"microbatch_sizes": [2, 1], "state_shares": [0.5, 0.5]}
    return Plan.by_hand(**stated | changes)


REFUSED: dict[str, tuple[Callable[[], Plan], str]] = {
    "no devices": (lambda: Plan(ranks=()), "no devices.*one entry per device"),
    "nobody computes": (lambda: by_hand(microbatch_sizes=[0, 0]), "no device computes"),
    "nobody has samples": (lambda: by_hand(rank_batch_sizes=[0, 0]), "no device computes"),
    "shares sum to more": (
        lambda: by_hand(state_shares=[0.5, 0.6]),
        r"shares \[0\.5, 0\.6\] sum to 1\.1 but must sum to 1",
    ),
    "shares sum to less": (lambda: by_hand(state_shares=[0.5, 0.4]), "sum to 0.9"),
    "a share is negative": (lambda: by_hand(state_shares=[-0.5, 1.5]), r"ranks\[0\].*-0\.5"),
    "a share exceeds one": (lambda: by_hand(state_shares=[0.0, 1.5]), r"ranks\[1\].*1\.5"),
    "a share is not a number": (
        lambda: by_hand(state_shares=[math.nan, 1]),
        r"ranks\[0\].*nan",
    ),
    "a share is infinite": (lambda: by_hand(state_shares=[0, math.inf]), r"ranks\[1\].*inf"),
    "a negative microbatch": (lambda: by_hand(microbatch_sizes=[2, -1]), "microbatch"),
    "an empty microbatch": (
        lambda: Plan(ranks=(RankPlan(microbatch_sizes=(2, 0), state_share=1.0),)),
        r"ranks\[0\].*\(2, 0\).*at least 1",
    ),
    "a negative count": (
        lambda: by_hand(num_microbatches=[2, -1]),
        "num_microbatches|microbatch",
    ),
    "a count without a size": (
        lambda: by_hand(microbatch_sizes=[2, 0], num_microbatches=[1, 3]),
        "microbatch",
    ),
    "a negative batch": (lambda: by_hand(rank_batch_sizes=[2, -1]), "samples|rank_batch_size"),
    "a batch without a size": (
        lambda: by_hand(microbatch_sizes=[2, 0], rank_batch_sizes=[2, 3]),
        "3 samples but microbatch size 0",
    ),
    "both counts and batches": (
        lambda: by_hand(num_microbatches=[1, 1], rank_batch_sizes=[2, 1]),
        "num_microbatches and rank_batch_sizes both given",
    ),
    "too few shares": (lambda: by_hand(state_shares=[1.0]), "state_shares has 1 entries"),
    "too many counts": (lambda: by_hand(num_microbatches=[1] * 3), "num_microbatches has 3"),
    "too few batches": (lambda: by_hand(rank_batch_sizes=[1]), "rank_batch_sizes has 1"),
    "too few claims": (lambda: by_hand(recompute=[True]), "recompute has 1"),
    "too many devices": (lambda: by_hand(devices=[DeviceSpec()] * 3), "devices has 3"),
    "a word where patterns belong": (lambda: by_hand(recompute=["head", ()]), "recompute"),
    "an even plan for nobody": (lambda: Plan.even(0, microbatch_size=1), "no devices"),
    "even without samples": (lambda: Plan.even(2, microbatch_size=0), "microbatches of 0"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_plan_that_cannot_be_is_refused_with_what_is_wrong(fault: str) -> None:
    make, message = REFUSED[fault]
    with pytest.raises(ValueError, match=f"plan: .*(?:{message})"):
        make()


# As a file


@pytest.mark.parametrize(
    "plan", [WHOLE, Plan.even(2, microbatch_size=3)], ids=["whole", "even"]
)
def test_a_plan_survives_the_way_to_a_file_and_back(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert Plan.load(str(path)).to_json() == plan.to_json() == path.read_text()
    assert json.loads(plan.to_json())["version"] == 2
    assert plan.to_json() == json.dumps(json.loads(plan.to_json()), indent=1) + "\n"


def test_equal_plans_have_equal_digests_and_any_difference_shows() -> None:
    document = json.loads(WHOLE.to_json())
    digests = {WHOLE.digest, Plan.from_json(json.dumps(document, indent=7)).digest}
    assert len(digests) == 1
    for change in VALID_CHANGES:
        changed = copy.deepcopy(document)
        change(changed)
        digests.add(Plan.from_json(json.dumps(changed)).digest)
    assert len(digests) == 1 + len(VALID_CHANGES)


def put(*path_and_value: Any) -> Callable[[Json], None]:
    *path, last, value = path_and_value

    def change(document: Json) -> None:
        for key in path:
            document = document[key]
        document[last] = value

    return change


def drop(*path: Any) -> Callable[[Json], None]:
    *outer, last = path

    def change(document: Json) -> None:
        for key in outer:
            document = document[key]
        del document[last]

    return change


VALID_CHANGES = [
    put("reshard_after_forward", True),
    put("num_rounds", 2),
    put("reshard_after_backward", False),
    put("reduce_each_round", False),
    put("last_round_size", 3),
    put("units", []),
    put("units", 0, "numel", 97),
    put("units", 0, "fqn", "blocks.1"),
    put("ranks", 0, "microbatch_sizes", [4, 3, 4]),
    put("ranks", 0, "recomputed_units", ["blocks.*"]),
    put("ranks", 0, "optimizer_on_host", True),
    put("ranks", 0, "inputs_on_host", ["*"]),
    put("ranks", 0, "tiled_units", ["*"]),
    put("ranks", 0, "tokens_per_tile", 4),
    put("ranks", 0, "device", {}),
    put("ranks", 0, "device", "host", "b"),
    put("ranks", 1, "device", "uuid", "GPU-8"),
]

RANK_FIELDS = (
    "device",
    "microbatch_sizes",
    "state_share",
    "recomputed_units",
    "inputs_on_host",
    "optimizer_on_host",
    "tiled_units",
    "tokens_per_tile",
)
UNIT_FIELDS = ("fqn", "numel")
TOP_FIELDS = ("version", "reshard_after_forward", "ranks", "units")
ILL_TYPED: dict[str, list[Any]] = {
    "version": [0, 3, "1", 1.0, True, None, [1]],
    "reshard_after_forward": [0, 1, "true", None, []],
    "ranks": [None, {}, "", 3, [], [3], [None], [[]], ["rank"]],
    "units": [None, {}, "", 3, [3], [None], [[]]],
    "device": [None, [], "T4", 0, {"hots": "a"}, {"host": 1}, {"memory_capacity_bytes": "1"}],
    "microbatch_sizes": [None, 4, "4", {}, [0], [-1], [1.5], ["1"], [None], [True], [[1]]],
    "state_share": [None, "0.5", [], True, -0.1, 1.5, 0.9, math.nan, math.inf, 10**400],
    "recomputed_units": [None, "*", True, {}, [1], [None], [["*"]]],
    "inputs_on_host": ["*", True, {}, [1], [None], [["*"]]],
    "optimizer_on_host": [0, "true", []],
    "tiled_units": ["*", True, {}, [1], [None], [["*"]]],
    "tokens_per_tile": [0, -1, 1.5, "4", True, []],
    "fqn": [None, 1, [], True],
    "numel": [None, "96", 9.5, True, -1],
}


def mutations() -> Iterator[Any]:
    """A place in the document, what is done there, and the field that the error must name."""
    places: dict[str, tuple[str | int, ...]] = {field: (field,) for field in TOP_FIELDS}
    places |= {field: ("ranks", 0, field) for field in RANK_FIELDS}
    places |= {field: ("units", 0, field) for field in UNIT_FIELDS}
    for field, place in places.items():
        if field not in RANK_FIELDS[4:]:
            yield pytest.param(drop(*place), field, place, id=f"{field} missing")
        for value in ILL_TYPED[field]:
            shown = repr(value) if len(repr(value)) < 40 else "huge"
            yield pytest.param(put(*place, value), field, place, id=f"{field} {shown}")
    objects: list[tuple[str | int, ...]] = [
        (),
        ("ranks", 1),
        ("units", 1),
        ("ranks", 0, "device"),
    ]
    for place in objects:
        change = put(*place, "sprices", 1)
        yield pytest.param(change, "sprices", place, id=f"unknown field at {place}")


MUTATIONS = list(mutations())


@pytest.mark.parametrize("change, field, place", MUTATIONS)
def test_a_spoiled_plan_file_is_refused_with_file_place_and_field(
    change: Callable[[Json], None], field: str, place: tuple[Any, ...], tmp_path: Path
) -> None:
    document = json.loads(WHOLE.to_json())
    change(document)
    path = tmp_path / "spoiled.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError) as caught:  # noqa: PT011 -- its message is looked at below
        Plan.load(path)
    message = str(caught.value)
    assert str(path) in message
    assert field in message.replace("state shares", "state_share").replace(
        "microbatch sizes", "microbatch_sizes"
    ).replace("no devices", "ranks")
    if len(place) > 1 and "sum to" not in message:
        assert f"{place[0]}[{place[1]}]" in message
    assert len(message) < 1000


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[]", "3", '"plan"', "{}", "not json", "[" * 100_000, '{"version": 1}'],
    ids=lambda text: text[:20] or "empty",
)
def test_a_file_that_holds_no_plan_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "spoiled.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"spoiled\.json: "):
        Plan.load(path)


def test_a_field_that_stands_twice_is_refused() -> None:
    text = Plan.even(1, microbatch_size=1).to_json()
    with pytest.raises(ValueError, match="'num_rounds' stands twice in one object"):
        Plan.from_json(text.replace("{", '{"num_rounds": 4,', 1))


def test_units_that_share_a_name_are_refused() -> None:
    unit = PlannedUnit(fqn="head", numel=3)
    with pytest.raises(ValueError, match=r"plan: .*head"):
        Plan(ranks=Plan.even(1, microbatch_size=1).ranks, units=(unit, unit))


# Places


@pytest.mark.parametrize(
    "recompute, on_host, unit",
    [
        (False, [True, False], "any unit"),
        (False, [["blocks.1"], False], "blocks.1"),
        (False, [["blocks.*"], False], "any unit"),
        ([["blocks.*"], True], [["blocks.1", "head"], False], "head"),
    ],
)
def test_inputs_on_the_host_of_units_that_are_not_recomputed_are_refused(
    recompute: Any, on_host: Any, unit: str
) -> None:
    with pytest.raises(ValueError, match=rf"^plan: ranks\[0\] has .* not recompute {unit}\. "):
        Plan.by_hand(microbatch_sizes=[1, 1], recompute=recompute, inputs_on_host=on_host)


def test_patterns_of_units_that_are_not_recomputed_are_refused_once_units_are_known() -> None:
    plan = Plan.by_hand(
        microbatch_sizes=[1], recompute=[["blocks.1"]], inputs_on_host=[["blocks.*"]]
    )
    units = tuple(PlannedUnit(fqn=f"blocks.{i}", numel=1) for i in range(2))
    with pytest.raises(ValueError, match=r"^plan: .* does not recompute blocks\.0\. "):
        replace(plan, units=units)


# Rounds


def test_a_file_of_version_1_is_a_plan_of_one_round() -> None:
    document = json.loads(WHOLE.to_json())
    for name in ("num_rounds", "reshard_after_backward", "reduce_each_round"):
        del document[name]
    document["version"] = 1
    assert Plan.from_json(json.dumps(document)) == WHOLE


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any),
    st.integers(1, 4),
    st.data(),
)
def test_every_sample_of_a_step_is_dealt_once(
    sizes: list[int], num_rounds: int, data: st.DataObject
) -> None:
    whole = sum(sizes)
    last = data.draw(st.integers(1, whole))
    plan = Plan.by_hand(
        microbatch_sizes=sizes,
        num_rounds=num_rounds,
        global_batch_size=(num_rounds - 1) * whole + last,
    )
    num_samples = data.draw(st.integers(0, plan.global_batch_size))
    dealt = [i for p in range(len(sizes)) for i in plan.sample_indices(p, num_samples)]
    assert sorted(dealt) == list(range(num_samples))
    for position, size in enumerate(sizes):
        for i in range(num_rounds):
            span = plan.round_samples(position, i, num_samples)
            assert len(span) <= size
            assert {n // whole for n in span} <= {i}


@pytest.mark.parametrize("total", [6, 10])
def test_a_global_batch_outside_the_rounds_is_refused(total: int) -> None:
    with pytest.raises(ValueError, match=f"global_batch_size is {total} but 3 rounds of 3"):
        Plan.by_hand(microbatch_sizes=[2, 1], num_rounds=3, global_batch_size=total)


def test_contradictory_flags_and_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="Set reshard_after_forward=False too"):
        Plan.by_hand(microbatch_sizes=[2], reshard_after_backward=False)
    with pytest.raises(ValueError, match="num_rounds is 0 but"):
        Plan.by_hand(microbatch_sizes=[2], num_rounds=0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
({"microbatch_sizes": [math.nan, 2]}, "plan: microbatch_sizes.* whole number"),
        ({"microbatch_sizes": "22"}, "plan: microbatch_sizes.* whole number"),
        ({"num_microbatches": [1, "2"]}, "plan: num_microbatches.* whole number"),
        ({"num_rounds": 1.5}, "plan: num_rounds.* whole number"),
        ({"global_batch_size": 4.0}, "plan: global_batch_size.* whole number"),
        ({"recompute": None}, "recompute is None. Give True, False, or a list"),
        ({"recompute": "blocks.*"}, "recompute is 'blocks.*'. Give True, False, or a list"),
        ({"recompute": [[1], False]}, "recompute has 1 among its patterns"),
        ({"inputs_on_host": True}, "does not recompute any unit"),
        ({"optimizer_on_host": ["no", True]}, r"optimizer_on_host\[0\] is 'no' but"),
        ({"reshard_after_forward": "no"}, "reshard_after_forward is 'no' but must be True"),
        ({"state_shares": ["0.5", "0.5"]}, "Give one number per device"),
        ({"microbatch_sizes": {2, 3}}, "Give one whole number per device"),
        ({"devices": ["cpu", "cpu"]}, r"devices\[0\] is 'cpu' but must be a DeviceSpec"),
        ({"devices": [DeviceSpec(memory_capacity_bytes=2.4e9)] * 2},  # type: ignore[arg-type]
         r"devices\[0\]: memory_capacity_bytes is 2400000000.0 but must be of type int"),
        ({"stages": [Stage(units="ab", num_ranks=1)] * 2},  # type: ignore[arg-type]
         r"stages\[0\]: units is 'ab' but must be of type list"),
    ],
)  # fmt: skip
def test_claims_of_a_wrong_type_are_refused(wrong: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"microbatch_sizes": [2, 2], **wrong}
    with pytest.raises(ValueError, match=words):
        Plan.by_hand(**given)


def test_what_can_be_listed_once_is_listed() -> None:
    plan = Plan.by_hand(
        microbatch_sizes=(each for each in (2, 2)),
        num_microbatches=np.array([1, 1]),
        state_shares=(each for each in (1, 1)),
        recompute=(each for each in (np.array(["a", "b"]), np.False_)),  # type: ignore[arg-type]
        optimizer_on_host=np.array([True, False]),  # type: ignore[arg-type]
        reshard_after_forward=np.False_,  # type: ignore[arg-type]
        num_rounds=np.int64(2),
        global_batch_size=np.int64(4),
        stages=(Stage(units=(unit,), num_ranks=1) for unit in "ab"),  # type: ignore[arg-type]
    )
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_is_printed_as_the_table_of_its_devices() -> None:
    gpu = DeviceSpec(kind="Tesla T4")
    plan = Plan.by_hand(
        microbatch_sizes=[8, 2, 2, 0],
        num_microbatches=[3, 1, 1, 0],
        state_shares=[0.25, 0.25, 0.25, 0.25],
        recompute=[True, False, False, False],
        optimizer_on_host=[False, False, False, True],
        devices=[DeviceSpec(kind="L4"), gpu, gpu, gpu],
        num_rounds=2,
    )
    table = """\
4 devices; a step is 56 samples (num_rounds=2, the table shows one round)
+---------------------------------------------------------------------------+
| device       | samples | microbatches | recomputes |  state | on the host |
|--------------+---------+--------------+------------+--------+-------------|
| 0 L4         |      48 |        3 x 8 |        all | 25.00% |           - |
| 1-2 Tesla T4 |       4 |        1 x 2 |          - | 25.00% |           - |
| 3 Tesla T4   |       0 |            - |          - | 25.00% |   optimizer |
+---------------------------------------------------------------------------+"""
    assert str(plan) == table
    assert plan._repr_html_() == f"<pre>{table}</pre>"
    kept = HoldsFor(param_dtype="bfloat16", tokens_per_sample=1, num_moments=2)
    assert "a step is 56 samples in bfloat16 (num" in str(replace(plan, holds_for=kept))
    assert repr(plan) == f"<Plan {plan.digest} of 4 devices and 56 samples a step>"
