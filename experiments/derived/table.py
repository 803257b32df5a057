"""The numbers of ``shardhet.pricing.efficiency`` as the fit gives them, as Python."""

from collections.abc import Iterator, Sequence

from experiments.derived.blocks import Timed
from experiments.derived.fit import arithmetic_of_group, fitted_by_group, middle, power_law
from shardhet.pricing.efficiency import Arithmetic


def lines(blocks: Sequence[Timed]) -> Iterator[str]:
    """The three tables."""
    efficiency_by_group = fitted_by_group(blocks)
    yield "FITTED: Mapping[str, Mapping[str, Efficiency]] = {"
    for kind in dict.fromkeys(kind for kind, _ in sorted(efficiency_by_group)):
        yield f'    "{kind}": {{'
        for dtype in ("float32", "float16"):
            if row := efficiency_by_group.get((kind, dtype)):
                numbers = f"{row.forward:.3f}, {row.backward:.3f}, {row.slowdown_per_s:.3f}"
                yield f'        "{dtype}": _row({numbers}),'
        yield "    },"
    yield "}"
    alike = {
        each: {g: e for g, e in efficiency_by_group.items() if arithmetic_of_group(g) is each}
        for each in Arithmetic
    }
    yield "POWER_LAWS: Mapping[Arithmetic, PowerLaw] = {"
    for each, groups in alike.items():
        law = power_law(groups)
        pairs = [
            f"({scale:.3f}, {exponent:.3f})" for scale, exponent in (law.forward, law.backward)
        ]
        yield f"    Arithmetic.{each.name}: PowerLaw(forward={pairs[0]}, backward={pairs[1]}),"
    yield "}"
    yield "UNKNOWN: Mapping[Arithmetic, Efficiency] = {"
    for each, groups in alike.items():
        row = middle(groups)
        yield f"    Arithmetic.{each.name}: Efficiency("
        parts = f"forward={row.forward:.3f}, backward={row.backward:.3f}"
        yield f"        {parts}, spread=SPREAD_UNKNOWN"
        yield "    ),"
    yield "}"
