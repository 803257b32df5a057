"""The units of drawn models: what they compute, what they return, what odd things they do.

Legend: N rows of a unit's batch (samples, or samples * heads), T tokens, D width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fuzzing.shapes import UnitShape

AUX_SCALE = 1e-2


@dataclass(frozen=True, slots=True)
class BlockResult:
    """A return value that torch's trees know."""

    rows: Tensor
    aux: Tensor | None
    name: str


torch.export.register_dataclass(BlockResult)


class ResultObject:
    """A return value that they do not know."""

    def __init__(self, rows: Tensor, aux: Tensor | None) -> None:
        self.rows = rows
        self.aux = aux


class Memory:
    """What attention caches look like: units add to it and read what is there."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def update(self, rows: Tensor) -> Tensor:
        self.kept.append(rows)
        return torch.stack(self.kept).mean(0)


class Block(nn.Module):
    """One unit: [N, T, D] in and out, or [T, N, D] where its shape says so."""

    calls: Tensor

    def __init__(self, shape: UnitShape, width: int) -> None:
        super().__init__()
        self.shape = shape
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width + 1)
        self.down = nn.Linear(width + 1, width, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.dropout = nn.Dropout(shape.dropout)
        self.core = CORES[shape.core](width)
        self.unused = nn.Parameter(torch.randn(3, 2)) if shape.has_unused_param else None
        if shape.odd in ("counter buffer", "counter scales"):
            self.register_buffer("calls", torch.zeros(()))
        self.num_calls = 0
        self.hidden: Tensor | None = None
        self.attribute: Tensor | None = None
        self.captured: list[Tensor] = []
        self.others: list[Block] = []  # in lists, so that they are no submodules
        self.sources: list[Block] = []  # whose attributes it reads
        if shape.odd in ("hook", "hook scalar"):
            self.up.register_forward_hook(Capture(self.captured, shape.odd == "hook scalar"))
        elif shape.odd == "hook of input":
            self.norm.register_forward_hook(CaptureInput(self.captured))

    def forward(self, x: Tensor, **context: Any) -> Any:
        x_NTD = x.transpose(0, 1) if self.shape.batch_at else x
        if self.shape.odd == "writes on input":
            x_NTD.mul_(1.01)
        elif self.shape.odd == "sets of input":
            self.attribute = AUX_SCALE * x_NTD.square().sum()
        states = context.get("states")
        y_NTD = self.norm(x_NTD)
        if self.shape.core == "recurrent":
            y_NTD, states = self.core(y_NTD, states)
        elif self.shape.core == "attention":
            y_NTD = self.core(y_NTD, context)
        else:
            y_NTD = self.core(y_NTD)
        if context.get("position") is not None:
            y_NTD = y_NTD + context["position"]  # [T, D]
        y_NTD = self.gain * self.dropout(self.down(F.gelu(self.up(y_NTD))))
        if self.shape.is_random and self.training:
            y_NTD = y_NTD * (0.9 + 0.2 * torch.rand_like(y_NTD))
        if self.shape.core != "attention" and context.get("padding") is not None:
            y_NTD = y_NTD * context["padding"][..., None]
        for source in self.sources:
            assert source.attribute is not None
            y_NTD = y_NTD + source.attribute[..., None]
        y_NTD = self._oddly(x_NTD + y_NTD, context)
        aux = self._aux(y_NTD, context)
        y = y_NTD.transpose(0, 1) if self.shape.batch_at else y_NTD
        return self._packed(y, aux, states)

    def _aux(self, y_NTD: Tensor, context: dict[str, Any]) -> Tensor | None:
        """What is returned besides, most of it 0-d."""
        mean_D = y_NTD.mean((0, 1))
        kinds: dict[str, Callable[[], Tensor]] = {
            "sum": lambda: y_NTD.square().sum(),
            "mean": lambda: y_NTD.square().mean(),
            "product": lambda: (mean_D * y_NTD.abs().mean((0, 1))).sum(),
            "max": lambda: y_NTD.amax(),
            "parameter": lambda: self.norm.weight.square().sum(),
            "vector": lambda: self.norm.weight * 2.0,
            "selected": lambda: y_NTD[y_NTD[..., 0] > 0],
            "rows": lambda: y_NTD.square().mean((1, 2)),
            "rare sum": lambda: 30 * F.relu(y_NTD - 2.2).square().sum(),
            "mean of valid": lambda: (
                y_NTD[context["padding"]].square().mean()
                if context["padding"] is not None
                else y_NTD.square().mean()
            ),
        }
        if not self.shape.aux:
            return None
        return AUX_SCALE * kinds[self.shape.aux]()

    def _packed(self, y: Tensor, aux: Tensor | None, states: Any) -> Any:
        kind = self.shape.returns
        if self.shape.core == "recurrent":
            return y, states, aux
        if kind == "dict":
            return {"aux": aux, "name": "block", "rows": y, "bits": (y > 0).long()}
        if kind == "dataclass":
            return BlockResult(y, aux, "block")
        if kind == "nested":
            return ({"rows": y}, [aux, 3], None), y.detach()
        if kind == "object":
            return ResultObject(y, aux)
        return (y, aux, "constant") if kind == "tuple" or aux is not None else y

    def _oddly(self, y_NTD: Tensor, context: dict[str, Any]) -> Tensor:
        """The trait that has made other libraries wrong, if the unit has one."""
        odd = self.shape.odd
        if odd == "sets scalar":
            self.attribute = AUX_SCALE * y_NTD.square().sum()
        elif odd in ("sets rows", "read by unit"):
            self.attribute = AUX_SCALE * y_NTD.square().mean(-1)
        elif odd in ("hidden rows", "hidden table"):
            assert self.hidden is not None
            y_NTD = y_NTD * self.hidden
        elif odd == "appends":
            context["bag"].append(AUX_SCALE * y_NTD.square().sum())
        elif odd == "fills":
            context["bag"]["energy"] = AUX_SCALE * y_NTD.square().sum()
        elif odd == "cache":
            y_NTD = y_NTD + 0.1 * context["memory"].update(y_NTD)
        elif odd in ("counter buffer", "counter scales"):
            if self.training:
                self.calls += 1
            y_NTD = y_NTD * (1 + 0.01 * self.calls) if odd == "counter scales" else y_NTD
        elif odd == "counts":
            self.num_calls += self.training
            y_NTD = y_NTD * (1 + 0.01 * self.num_calls)
        elif odd == "writes on shared":
            context["shared"].add_(y_NTD.detach())
        elif odd == "reads other":
            y_NTD = y_NTD + F.linear(y_NTD, self.others[0].up.weight[: y_NTD.shape[-1]])
        elif odd.startswith("closure"):
            y_NTD = context["function"](y_NTD)
        elif odd == "knows batch size":
            y_NTD = y_NTD * (1 + 0.01 * len(y_NTD))
        elif odd == "mixes samples":
            y_NTD = y_NTD - 0.1 * y_NTD.mean(0)
        elif odd == "calls unit":
            y_NTD = y_NTD + 0.1 * rows_of_result(self.others[0](y_NTD))[0]
        return y_NTD


class Capture:
    """A forward hook that keeps what a layer gave."""

    def __init__(self, captured: list[Tensor], as_scalar: bool) -> None:
        self.captured = captured
        self.as_scalar = as_scalar

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        kept = output.square().sum() if self.as_scalar else output.square().mean(-1)
        self.captured.append(AUX_SCALE * kept)


class CaptureInput:
    """A forward hook that keeps what a layer was given."""

    def __init__(self, captured: list[Tensor]) -> None:
        self.captured = captured

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.captured.append(AUX_SCALE * args[0].square().mean(-1))


def rows_of_result(result: Any) -> tuple[Tensor, Tensor | None, Any]:
    """The rows, what was returned besides, and recurrent states, of any kind of result."""
    if isinstance(result, Tensor):
        return result, None, None
    if isinstance(result, dict):
        return result["rows"], result["aux"], None
    if isinstance(result, BlockResult | ResultObject):
        return result.rows, result.aux, None
    if isinstance(result[0], tuple):
        return result[0][0]["rows"], result[0][1][0], None
    if isinstance(result[1], tuple):
        return result[0], result[2], result[1]
    return result[0], result[1], None


class Attention(nn.Module):
    """Softmax over tokens; masks [T, T] and [N, T], a bias [T, T].  No biases: the key's
    would have a gradient of rounding errors only.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)

    def forward(self, x_NTD: Tensor, context: dict[str, Any]) -> Tensor:
        q, k, v = self.qkv(x_NTD).chunk(3, dim=-1)
        scores_NTT = q @ k.transpose(1, 2)
        if context.get("bias") is not None:
            scores_NTT = scores_NTT + context["bias"]
        if context.get("causal") is not None:
            scores_NTT = scores_NTT.masked_fill(~context["causal"], float("-inf"))
        if context.get("padding") is not None:
            hidden_N1T = ~context["padding"][:, None, :]
            scores_NTT = scores_NTT.masked_fill(hidden_N1T, float("-inf"))
        return scores_NTT.softmax(-1) @ v


class Recurrent(nn.Module):
    """An LSTM with states [layers, N, D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width)

    def forward(self, x_NTD: Tensor, states: Any) -> tuple[Tensor, Any]:
        y_TND, states = self.lstm(x_NTD.transpose(0, 1), states)
        return y_TND.transpose(0, 1), states


class Experts(nn.Module):
    """Each token goes to one of two experts: shapes depend on values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x_NTD: Tensor) -> Tensor:
        share_NTE = self.router(x_NTD).softmax(-1)
        best_NT = share_NTE.argmax(-1)
        y_NTD = torch.zeros_like(x_NTD)
        for i, expert in enumerate(self.experts):
            chosen_NT = best_NT == i
            weight_K1 = share_NTE[chosen_NT][:, i : i + 1]
            y_NTD[chosen_NT] = weight_K1 * expert(x_NTD[chosen_NT])
        return y_NTD


class BatchNorm(nn.Module):
    """Batch norm over samples and tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x_NTD: Tensor) -> Tensor:
        return self.norm(x_NTD.transpose(1, 2)).transpose(1, 2)


class Mlp(nn.Linear):
    """A layer that needs no mask."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


CORES: dict[str, Callable[[int], nn.Module]] = {
    "mlp": Mlp,
    "attention": Attention,
    "recurrent": Recurrent,
    "experts": Experts,
    "batchnorm": BatchNorm,
}


class Wrapper(nn.Module):
    """A plain module around a unit."""

    def __init__(self, inner: Block) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, **context: Any) -> Any:
        return self.inner(x, **context)


class Table(nn.Module):
    """A unit that is called without a batch: a row per token, or one per pair of tokens."""

    def __init__(self, width: int, num_positions: int, *, is_bias: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding(num_positions, width)
        self.is_bias = is_bias

    def forward(self, length: int | Tensor) -> Tensor:
        if isinstance(length, Tensor):
            return self.rows(length)
        position_T = torch.arange(length)
        if not self.is_bias:
            return self.rows(position_T)
        distance_TT = (position_T[:, None] - position_T[None]).abs()
        return self.rows(distance_TT).mean(-1)
