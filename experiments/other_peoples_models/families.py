"""All families, and the ways in which each is called."""

from collections.abc import Callable, Iterator

from experiments.other_peoples_models.other_families import OTHERS
from experiments.other_peoples_models.plans import APART, IN_ROUNDS, IN_TILES, PLANS, SHARED
from experiments.other_peoples_models.records import Case, Family, Loss, Way
from experiments.other_peoples_models.transformers_families import TRANSFORMERS

FAMILIES: dict[str, Family] = {family.name: family for family in (*TRANSFORMERS, *OTHERS)}

DOCUMENTED = Way(name="logits")
# Each with what it means something for.
_WAYS: tuple[tuple[Way, Callable[[Family], object]], ...] = (
    (DOCUMENTED, lambda family: True),
    (
        Way(name="labels", loss=Loss.INNER),
        lambda family: family.source == "transformers" and not family.takes_no_default,
    ),
    (Way(name="num_items", loss=Loss.ITEMS), lambda family: family.task.takes_num_items),
    (
        Way(name="loss_fn", loss=Loss.FUNCTION),
        lambda family: family.takes_loss_fn and not family.takes_no_default,
    ),
    (Way(name="no mask", without=("attention_mask",)), lambda family: family.task.has_mask),
    (Way(name="positional", is_positional=True), lambda family: True),
    (Way(name="collision", collides=True), lambda family: family.task.has_length),
    (Way(name="evaluation", evaluates=True), lambda family: True),
    (
        Way(name="hidden states", call_options={"output_hidden_states": True}),
        lambda family: family.has_attentions,
    ),
    (
        Way(
            name="attentions",
            call_options={"output_attentions": True},
            config={"attn_implementation": "eager"},
        ),
        lambda family: family.has_attentions,
    ),
    (
        Way(name="router loss", loss=Loss.INNER, call_options={"output_router_logits": True}),
        lambda family: family.is_moe,
    ),
    (
        Way(name="contrastive", loss=Loss.INNER, call_options={"return_loss": True}),
        lambda family: family.takes_no_default,
    ),
    (Way(name="lora", has_lora=True), lambda family: family.lora_targets),
    (Way(name="units", has_coarse_units=True), lambda family: family.coarse_units),
    # With --tokens alone
    (Way(name="no dropout", drops=False), lambda family: False),
    (Way(name="no dropout, labels", drops=False, loss=Loss.INNER), lambda family: False),
    (Way(name="no dropout, num_items", drops=False, loss=Loss.ITEMS), lambda family: False),
    # With --stages alone
    (Way(name="stages", is_staged=True), lambda family: False),
    (Way(name="stages, lora", is_staged=True, has_lora=True), lambda family: False),
)
WAYS: dict[str, Way] = {way.name: way for way, _ in _WAYS}
STAGED = ("stages", "stages, lora")
WITH_ALL_PLANS = (DOCUMENTED.name, "labels", "lora", "units")


def ways_of(family: Family) -> list[str]:
    """Those that mean something for it, the documented one first."""
    return [way.name for way, suits in _WAYS if suits(family)]


def cases_by_tokens(family: Family) -> Iterator[Case]:
    """In tiles, and as devices that share samples, which draw other numbers for dropout."""
    ways = ["no dropout"]
    ways += [f"no dropout, {w}" for w in ("labels", "num_items") if w in ways_of(family)]
    yield Case(family=family.name, way=DOCUMENTED.name, plan=IN_TILES.name)
    for plan in (IN_TILES, SHARED):
        for way in ways:
            yield Case(family=family.name, way=way, plan=plan.name)


def cases_of(family: Family, way: str, *, is_quick: bool = False) -> Iterator[Case]:
    """All plans for what is documented most, the one with most in it for the others."""
    has_all = way in WITH_ALL_PLANS and not is_quick
    for plan in PLANS if has_all else (APART.name,):
        if plan != IN_ROUNDS.name or way in (DOCUMENTED.name, "lora"):
            yield Case(family=family.name, way=way, plan=plan)
