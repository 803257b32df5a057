"""Save a HetFSDP as a folder that plain ``from_pretrained`` can load."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import Transpose, revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_NAME

from shardhet.comm.channel import may_take_long
from shardhet.fsdp import HetFSDP
from shardhet.fsdp.module_proxy import around, stand_ins
from shardhet.fsdp.params.state import persistent_buffers
from shardhet.hf.folders.adapters import adapter_fqns, adapter_state, is_adapted
from shardhet.hf.folders.reading import INDEX, WEIGHTS


def save_whole(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write one file, as transformers and PEFT do."""
    whole = {name: each.detach().cpu().contiguous() for name, each in tensors.items()}
    save_file(whole, path, metadata={"format": "pt"})


class WeightFiles:
    """The weight files of a folder, each of one unit or of several small ones."""

    def __init__(
        self, folder: Path, expected: Mapping[str, Tensor], *, least_file_bytes: int
    ) -> None:
        """``expected`` are all tensors, on the meta device.

        What is held is written after the unit with which it has ``least_file_bytes``.
        """
        self._folder, self._least_bytes = folder, least_file_bytes
        self._left = dict(expected)
        self._total_bytes = sum(each.nbytes for each in expected.values())
        self._held: dict[str, Tensor] = {}
        self._written: list[list[str]] = []  # names in each file

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the tensors of a unit; raises ``ValueError`` for one that is not expected."""
        for name, tensor in tensors.items():
            listed = self._left.pop(name, None)
            if listed is None or (tensor.shape, tensor.dtype) != (listed.shape, listed.dtype):
                needed = (
                    "nothing" if listed is None else f"{listed.dtype} {tuple(listed.shape)}"
                )
                raise ValueError(
                    f"{name}: {tensor.dtype} {tuple(tensor.shape)} came but {needed} is still "
                    "to be written. Save a model whose parameters keep their shapes and dtypes."
                )
            self._held[name] = tensor
        if sum(each.nbytes for each in self._held.values()) >= self._least_bytes:
            self._write_held()

    def close(self, num_parameters: int) -> None:
        """Write the rest, and an index of several files; ``ValueError`` if tensors are missing.

        ``num_parameters`` is said in the index.
        """
        if self._left:
            raise ValueError(f"{self._folder}: {sorted(self._left)[:8]} were never written.")
        if self._held or not self._written:
            self._write_held()
        number = len(self._written)
        names = [f"model-{i + 1:05d}-of-{number:05d}.safetensors" for i in range(number)]
        for i, name in enumerate(names if number > 1 else [WEIGHTS]):
            self._unfinished(i).rename(self._folder / name)
        if number > 1:
            parts = zip(names, self._written, strict=True)
            metadata = {"total_parameters": num_parameters, "total_size": self._total_bytes}
            file_by_tensor = {each: name for name, part in parts for each in part}
            index = {"metadata": metadata, "weight_map": file_by_tensor}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self._folder / INDEX).write_text(text, encoding="utf-8")

    def _write_held(self) -> None:
        save_whole(self._held, self._unfinished(len(self._written)))
        self._written.append(list(self._held))
        self._held = {}

    def _unfinished(self, number: int) -> Path:
        return self._folder / f"part-{number}"


LEAST_FILE_BYTES = 2**25


@may_take_long("save_pretrained")
def save_pretrained(
    model: nn.Module, save_directory: str | Path, *, least_file_bytes: int = LEAST_FILE_BYTES
) -> None:
    """Write the same folder as ``save_pretrained`` of the plain model.  Collective.

    ``model`` is a HetFSDP, or what one is around, as callbacks of a HetTrainer get it.

    Rank zero writes, and holds one unit at a time, or several of together less than
    ``least_file_bytes``.  For a PeftModel, only the adapters are written.  The folder appears
    when it is complete; files of an earlier model in it are removed, other files stay.
    """
    folder = Path(save_directory)
    model = model if isinstance(model, HetFSDP) else around(model, "save_pretrained")
    with model.fail_together("save_pretrained"):
        if is_adapted(model.module):
            _save_adapters(model, folder)
        elif isinstance(model.module, PreTrainedModel):
            _save_whole(model, folder, least_file_bytes)
        else:
            raise ValueError(
                f"save_pretrained: {type(model.module).__name__} is not a transformers model. "
                "Use model.state_dict(), which is whole on rank zero."
            )


def save_model(model: HetFSDP, folder: Path) -> None:
    """``save_pretrained``, or ``model.safetensors`` of a model that is not of transformers, as
    its Trainer writes it.  Collective.
    """
    if is_adapted(model.module) or isinstance(model.module, PreTrainedModel):
        save_pretrained(model, folder)
        return
    with may_take_long("saving the model"):
        state = model.state_dict()
        if model.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = folder / f"{SAFE_WEIGHTS_NAME}.unfinished"
            save_whole({k: v for k, v in state.items() if isinstance(v, Tensor)}, unfinished)
            unfinished.replace(folder / SAFE_WEIGHTS_NAME)


def _save_whole(model: HetFSDP, folder: Path, least_file_bytes: int) -> None:
    module: Any = model.module
    whole = _shapes(model)
    saved = _reverted(module, whole)
    is_writer = model.rank == 0
    with _replaced_when_complete(folder, is_writer) as unfinished:
        files = None
        if unfinished is not None:
            _save_configs(module, unfinished)
            files = WeightFiles(unfinished, saved, least_file_bytes=least_file_bytes)
        for tensors in _units(model, whole):
            if files is not None:
                files.add(_reverted(module, tensors))
        if files is not None:
            files.close(sum(tensor.numel() for tensor in whole.values()))
    model.exchange([])  # no rank goes on before the folder exists


def _units(model: HetFSDP, whole: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The part of the state dict in each unit, then the buffers; {} except on rank zero."""
    for params in model.gather_units(lambda fqn: fqn in whole):
        yield {fqn: tensor for fqn, tensor in params.items() if fqn in whole}
    if model.rank == 0:
        yield {fqn: b for fqn, b in persistent_buffers(model.module) if fqn in whole}


def _shapes(model: HetFSDP) -> dict[str, Tensor]:
    """The state dict to save, on the meta device, with each tied tensor only once."""
    module: Any = model.module
    ignored = set(module._keys_to_ignore_on_save or ())
    local_shards = model.sharded_state_dict()
    shapes = {
        fqn: torch.empty(box.global_shape, dtype=box.tensor.dtype, device="meta")
        for fqn, box in local_shards.items()
    }
    for fqn, buffer in persistent_buffers(module):
        shapes[fqn] = torch.empty_like(buffer, device="meta")
    return {fqn: tensor for fqn, tensor in shapes.items() if fqn not in ignored}


def _reverted(module: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` with the names and shapes that they have in files."""
    made = revert_weight_conversion(_with_whole_shapes(module), dict(tensors))
    return dict(made)


def _with_whole_shapes(module: Any) -> Any:
    """A model with whole shapes for transformers' rules; that of HetFSDP has only rows."""
    rules = getattr(module, "_weight_conversions", None) or []
    ops = [op for rule in rules for op in getattr(rule, "operations", ())]
    if not any(isinstance(op, Transpose) and op.check_dims for op in ops):
        return module
    with torch.device("meta"):
        whole = type(module)._from_config(deepcopy(module.config))
    whole._weight_conversions = rules
    return whole


def _save_configs(module: Any, folder: Path) -> None:
    config = deepcopy(module.config)
    config.architectures = [type(module).__name__]
    config.dtype = str(module.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if module.can_generate():
        module.generation_config.save_pretrained(folder)


def _save_adapters(model: HetFSDP, folder: Path) -> None:
    module: Any = model.module
    buffers = dict(persistent_buffers(module))
    shapes = {fqn: buffer.shape for fqn, buffer in buffers.items()} | {
        fqn: slot.shape for flat in model._flats for slot in flat.slots for fqn in slot.fqns
    }
    is_writer = model.rank == 0
    with _replaced_when_complete(folder, is_writer) as unfinished:
        for adapter, config in module.peft_config.items():
            with stand_ins(model._flats):  # PEFT asks modules for their names
                wanted = adapter_fqns(module, adapter, shapes)
            gathered = {fqn: each for fqn, each in buffers.items() if fqn in wanted}
            for tensors in model.gather_units(wanted.__contains__):
                gathered |= {fqn: t for fqn, t in tensors.items() if fqn in wanted}
            if unfinished is None:
                continue
            place = unfinished if adapter == "default" else unfinished / adapter
            place.mkdir(exist_ok=True)
            with stand_ins(model._flats):
                state = adapter_state(module, adapter, gathered)
            own = {name: tensor.clone() for name, tensor in state.items()}  # some are shared
            save_whole(own, place / "adapter_model.safetensors")
            _save_adapter_config(config, place)
        if unfinished is not None:
            module.create_or_update_model_card(str(unfinished))
    model.exchange([])


def _save_adapter_config(config: Any, folder: Path) -> None:
    saved = deepcopy(config)
    saved.inference_mode = True  # as PEFT's own save_pretrained writes it
    saved.save_pretrained(str(folder))


@contextmanager
def _replaced_when_complete(folder: Path, is_writer: bool) -> Iterator[Path | None]:
    """Context with a temporary folder, whose files are moved to ``folder`` at the end.

    It is None on ranks that do not write.  If the body fails, ``folder`` is unchanged.
    """
    if not is_writer:
        yield None
        return
    if folder.is_file():
        raise ValueError(f"save_pretrained: {folder} is a file. Name a folder.")
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        _move_into(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _move_into(unfinished: Path, folder: Path) -> None:
    if not folder.exists():
        unfinished.rename(folder)
        return
    for pattern in ("model*.safetensors", INDEX):
        for old in folder.glob(pattern):
            old.unlink()
    for new in sorted(unfinished.iterdir()):
        if new.is_dir():
            shutil.rmtree(folder / new.name, ignore_errors=True)
        new.replace(folder / new.name)
    unfinished.rmdir()
