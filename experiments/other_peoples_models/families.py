"""All families, and the ways in which each is called."""

from collections.abc import Iterator

from experiments.other_peoples_models.other_families import OTHERS
from experiments.other_peoples_models.plans import APART, PLANS
from experiments.other_peoples_models.records import Case, Family, Loss, Way
from experiments.other_peoples_models.transformers_families import TRANSFORMERS

FAMILIES: dict[str, Family] = {family.name: family for family in (*TRANSFORMERS, *OTHERS)}

DOCUMENTED = Way(name="logits")
WAYS: dict[str, Way] = {
    way.name: way
    for way in (
        DOCUMENTED,
        Way(name="labels", loss=Loss.INNER),
        Way(name="num_items", loss=Loss.ITEMS),
        Way(name="loss_fn", loss=Loss.FUNCTION),
        Way(name="no mask", without=("attention_mask",)),
        Way(name="positional", is_positional=True),
        Way(name="collision", collides=True),
        Way(name="evaluation", evaluates=True),
        Way(name="hidden states", call_options={"output_hidden_states": True}),
        Way(
            name="attentions",
            call_options={"output_attentions": True},
            config={"attn_implementation": "eager"},
        ),
        Way(name="router loss", loss=Loss.INNER, call_options={"output_router_logits": True}),
        Way(name="contrastive", loss=Loss.INNER, call_options={"return_loss": True}),
        Way(name="lora", has_lora=True),
        Way(name="units", has_coarse_units=True),
    )
}
WITH_ALL_PLANS = (DOCUMENTED.name, "labels", "lora", "units")


def ways_of(family: Family) -> Iterator[str]:
    """Those that mean something for it, the documented one first."""
    is_transformers = family.source == "transformers"
    yield DOCUMENTED.name
    if is_transformers and not family.takes_no_default:
        yield "labels"
    if family.task.takes_num_items:
        yield "num_items"
    if family.takes_loss_fn and not family.takes_no_default:
        yield "loss_fn"
    if family.task.has_mask:
        yield "no mask"
    yield "positional"
    if family.task.has_length:
        yield "collision"
    yield "evaluation"
    if family.has_attentions:
        yield "hidden states"
        yield "attentions"
    if family.is_moe:
        yield "router loss"
    if family.takes_no_default:
        yield "contrastive"
    if family.coarse_units:
        yield "units"
    if family.lora_targets:
        yield "lora"


def cases_of(family: Family, way: str, *, is_quick: bool = False) -> Iterator[Case]:
    """All plans for what is documented most, the one with most in it for the others."""
    has_all = way in WITH_ALL_PLANS and not is_quick
    for plan in PLANS if has_all else (APART.name,):
        yield Case(family=family.name, way=way, plan=plan)
