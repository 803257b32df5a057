"""What a workload counts: shapes, FLOPs and bytes, against the decoder that it describes."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from shardhet.records.workload import Unit, UnitKind, Workload

SHAPE: dict[str, int] = {
    "num_layers": 3,
    "width": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_width": 320,
    "seq_len": 64,
    "vocab_size": 256,
}
SMALL = Workload.transformer(**SHAPE)


def spoiled(**changes: object) -> dict[str, object]:
    return {**json.loads(SMALL.to_json()), **changes}


def test_a_workload_is_read_as_it_was_written() -> None:
    assert Workload.from_json(SMALL.to_json()) == SMALL


def test_the_analytic_decoder_is_the_one_that_is_trained() -> None:
    torch = pytest.importorskip("torch", reason="compares with the model in torch")
    from torch.utils.flop_counter import FlopCounterMode

    from shardhet.models.decoder import Decoder, DecoderConfig

    config = DecoderConfig(**SHAPE)
    with torch.device("meta"):
        model = Decoder(config)
        x_BTD = torch.empty(2, 64, 128, requires_grad=True)
        targets_BT = torch.empty(2, 64, dtype=torch.long)
    assert SMALL.numel == sum(param.numel() for param in model.parameters())
    modules = {"embedding": model.embedding, "block": model.blocks[0], "head": model.head}
    for name, module in modules.items():
        shapes = [tuple(param.shape) for param in module.parameters()]
        assert shapes == list(SMALL.kind_by_name[name].param_shapes)
    for name, args in (("block", (x_BTD,)), ("head", (x_BTD, targets_BT))):
        kind = SMALL.kind_by_name[name]
        with FlopCounterMode(display=False) as forward:
            output = modules[name](*args)
        with FlopCounterMode(display=False) as backward:
            (output[0] if name == "head" else output.sum()).backward()
        assert forward.get_total_flops() == 2 * kind.forward_flops
        assert backward.get_total_flops() == 2 * kind.backward_flops


@pytest.mark.parametrize(
    "dtype, fuses_norms", [("float32", False), ("float32", True), ("bfloat16", True)]
)
def test_activation_bytes_are_what_autograd_keeps(dtype: str, fuses_norms: bool) -> None:
    torch = pytest.importorskip("torch", reason="compares with the model in torch")
    from shardhet.models.decoder import Decoder, DecoderConfig

    model = Decoder(DecoderConfig(**{**SHAPE, "num_layers": 1})).to(getattr(torch, dtype))
    workload = Workload.transformer(**SHAPE, param_dtype=dtype, fuses_norms=fuses_norms)
    if fuses_norms:
        for module in (model.blocks[0].attention_norm, model.blocks[0].mlp_norm):
            module.forward = fused_norm(module)
        model.head.norm.forward = fused_norm(model.head.norm)
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    x_BTD = torch.randn(2, 64, 128, dtype=getattr(torch, dtype), requires_grad=True)
    inputs = {"block": (x_BTD,), "head": (x_BTD, torch.zeros(2, 64, dtype=torch.long))}
    itemsize = workload.param_itemsize
    rotation_bytes = 2 * 64 * 16 * itemsize  # sine and cosine, the same for every sample
    loss_bytes = {"block": rotation_bytes, "head": 4}  # the head keeps its token count
    for name, module in (("block", model.blocks[0]), ("head", model.head)):
        kept: dict[int, tuple[int, object]] = {}

        def keep(tensor: object, kept: dict[int, tuple[int, object]] = kept) -> object:
            storage = tensor.untyped_storage()  # type: ignore[attr-defined]
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            module(*inputs[name])
        kind = workload.kind_by_name[name]
        of_targets = 2 * 64 * 8 if name == "head" else 0  # replaced by the masked ones
        expected = 2 * (kind.input_bytes + kind.activation_bytes) - of_targets
        assert sum(nbytes for nbytes, _ in kept.values()) == expected + loss_bytes[name]


def fused_norm(module: Any) -> Callable[[Any], Any]:
    """RMSNorm that keeps what torch's kernel on CUDA keeps: its input and one statistic."""
    import torch

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            ctx.save_for_backward(x, weight, scale)
            return (wide * scale).to(x.dtype) * weight

    return lambda x: Fused.apply(x, module.weight)


def test_optimizers_with_fewer_moments_have_less_state() -> None:
    assert SMALL.with_moments(0).state_bytes_per_element == 4 + 4
    assert SMALL.with_moments(0).with_moments(2) == SMALL
    half = UnitKind(
        name="half",
        param_shapes=((8, 8), (8, 8)),
        forward_flops=0,
        backward_flops=0,
        input_bytes=0,
        activation_bytes=0,
        transient_bytes=0,
        frozen_params=(0,),
    )
    units = (Unit(fqn="a", kind="half"),)
    adam = Workload(kinds=(half,), units=units, state_bytes_per_element=4 + 12 / 2)
    assert [adam.with_moments(k).state_bytes_per_element for k in range(3)] == [6, 8, 10]
    assert adam.with_moments(1).grad_bytes_per_element == 2


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"version": 2}, "version 2"),
        ({"units": []}, "0 units"),
        ({"units": [{"fqn": "a", "kind": "nothing"}]}, "nothing"),
        ({"param_dtype": "int8"}, "param_dtype"),
        ({"tokens_per_sample": 0}, "tokens_per_sample"),
        ({"state_bytes_per_element": 0.1}, "state_bytes_per_element"),
        ({"kinds": 3}, "kinds"),
        ({"extra": 1}, "extra"),
    ],
)
def test_a_spoiled_workload_is_refused_by_field(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        Workload.from_json(json.dumps(spoiled(**changes)), source="w.json")
    assert str(raised.value).startswith("w.json")


def test_kinds_may_not_hold_negative_figures() -> None:
    with pytest.raises(ValueError, match="input_bytes"):
        UnitKind(
            name="x",
            param_shapes=((3,),),
            forward_flops=1,
            backward_flops=1,
            input_bytes=-1,
            activation_bytes=0,
            transient_bytes=0,
        )


def test_the_root_holds_parameters_and_computes_nothing() -> None:
    workload = Workload(
        kinds=SMALL.kinds,
        units=(Unit(fqn="blocks.0", kind="block"), Unit(fqn="", kind="head")),
    )
    assert workload.num_units_by_kind == {"embedding": 0, "block": 1, "head": 0}
    assert workload.numel == SMALL.kind_by_name["block"].numel + 128 + 256 * 128
