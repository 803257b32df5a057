"""Find the best plan: a search with a proof of optimality, and simpler planners to compare.

That no other plan of the candidates is faster than the bound follows from, in this order:

    Oracle._meet          no choice fits within given limits on phases, where L(lambda) < S
    _Search.search_boxes  splits boxes of limits, the least bound first, until that reaches the
                          time of the best choice, or the effort is spent; where choices are
                          few, ``search.few`` looks at all of them instead
    search_table          leaves out candidates that compute longer than a cut, and raises the
                          cut until the choice found is within it; where that leaves no room to
                          round shares to rows, it searches for one that does (``rounded``), and
                          keeps the bound of the first search
    fitting_plans         rounds shares to rows, by which a plan may not fit, or be slower than
                          the bound, but never the bound break; then less room is tried.
                          With shares that are demanded, ``_lenient_bound_s`` bounds those that
                          are a few rows off
    find._solve           takes the least bound of all forms and rounds; one whose bound is no
                          better than the best plan is not searched, and its bound counts too

Nothing is proven of plans whose last round is smaller, or of which devices are left idle
(``idle.SubsetSearch``).
"""

from typing import TYPE_CHECKING, Any

from shardhet.planner.problem.constraints import Constraints, DeviceLimits
from shardhet.planner.problem.solution import PlanError, PlanSolution

if TYPE_CHECKING:
    from shardhet.planner.find import find_plan, solve
    from shardhet.planner.search.search import Effort

__all__ = [
    "Constraints",
    "DeviceLimits",
    "Effort",
    "PlanError",
    "PlanSolution",
    "find_plan",
    "solve",
]


def __getattr__(name: str) -> Any:
    """What searches is imported when first used."""
    if name not in __all__:
        raise AttributeError(f"module 'shardhet.planner' has no attribute {name!r}")
    from shardhet.planner import find

    return getattr(find, name)
