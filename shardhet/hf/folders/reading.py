"""Read rows of a model's parameters from a folder of safetensors, without reading the rest.

transformers may change tensors between file and model (it renames keys, stacks experts, splits
fused projections).  Its own rules are applied here in the same way; a *recipe* says which
tensors of the folder one rule turns into which parameters.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from shardhet.records.layout import Span

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class SafetensorsFolder:
    """The tensors of a folder by key, read slice by slice."""

    def __init__(self, folder: Path) -> None:
        """Open the folder's files; raises ``ValueError`` if there are none."""
        self.folder = folder
        if (folder / INDEX).is_file():
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            listed: dict[str, str] = index["weight_map"]
        elif (folder / WEIGHTS).is_file():
            listed = {"": WEIGHTS}
        else:
            found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
            raise ValueError(
                f"{folder}: found {found[:12]} but no {WEIGHTS} or {INDEX}. Save the model "
                "with save_pretrained, or download it with huggingface_hub.snapshot_download."
            )
        files = {
            name: safe_open(folder / name, framework="pt")
            for name in sorted(set(listed.values()))
        }
        places = [(key, name) for name, file in files.items() for key in [*file.keys()]]
        self._file_by_key = {key: files[name] for key, name in places}
        # Ranks that write with torch.distributed.checkpoint may leave both behind.
        wrong = {key for key, _ in {*listed.items()} - {*places, ("", WEIGHTS)}}
        wrong |= {
            key for key, number in Counter(key for key, _ in places).items() if number > 1
        }
        if wrong:
            raise ValueError(
                f"{folder}: {sorted(wrong)[:8]} of {INDEX} are not in the file that it names, "
                "or in two files, but each tensor is needed once. Save the model again from "
                "one process."
            )

    @property
    def keys(self) -> list[str]:
        """The keys, in the order in which transformers reads them."""
        return sorted(self._file_by_key, key=dot_natural_key)

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(self._file_by_key[key].get_slice(key).get_shape())

    def dtype_name(self, key: str) -> str:
        """The name of the dtype in the file."""
        return str(self._file_by_key[key].get_slice(key).get_dtype())

    def read(self, key: str, rows: Span | None = None) -> Tensor:
        """The tensor, or rows of it; a scalar is one row."""
        if rows is None or not self.shape(key):
            tensor: Tensor = self._file_by_key[key].get_tensor(key)
            return tensor if rows is None else tensor.reshape(1)[rows.start : rows.stop]
        rows_of: Tensor = self._file_by_key[key].get_slice(key)[rows.start : rows.stop]
        return rows_of

    def describe(self) -> list[Any]:
        """Keys, shapes and dtypes, for comparison between ranks."""
        return [[key, list(self.shape(key)), self.dtype_name(key)] for key in self.keys]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How tensors of the folder become one or more tensors of the model."""

    converter: WeightConverter | None  # None: the tensor as it is
    name: str  # the first tensor of the model that it produces
    sources: tuple[tuple[str, str], ...]  # (pattern of the converter, key in the folder)

    @property
    def num_stacked(self) -> int | None:
        """The number of tensors stacked as rows, if each row needs only its own sources."""
        if self.converter is None:
            return None
        first, *others = self.converter.operations
        if not (isinstance(first, MergeModulelist) and first.dim == 0):
            return None
        if not all(_leaves_rows_alone(op) for op in others):
            return None
        patterns = [pattern for pattern, _ in self.sources]
        counts = {patterns.count(pattern) for pattern in patterns}
        return counts.pop() if len(counts) == 1 else None

    def apply(self, tensors: Sequence[Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        """The model's tensors from those of the folder, one per source."""
        if self.converter is None:
            return {self.name: tensors[0]}
        converter = deepcopy(self.converter)
        for (pattern, key), tensor in zip(self.sources, tensors, strict=True):
            converter.add_tensor(self.name, key, pattern, tensor)  # type: ignore[arg-type]
        made = converter.convert(self.name, model=model, config=model.config)
        return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}


def _leaves_rows_alone(op: Any) -> bool:
    if isinstance(op, Concatenate):
        return bool(op.dim >= 1)
    return isinstance(op, Transpose) and min(op.dim0, op.dim1) >= 1 and not op.check_dims


class PretrainedRows:
    """Reads the parameters and buffers of ``model`` (on the meta device) from a folder."""

    def __init__(
        self,
        folder: SafetensorsFolder,
        model: PreTrainedModel,
        key_mapping: Mapping[str, str] | None = None,
    ) -> None:
        """Find a recipe for every tensor; raises ``ValueError`` if shapes differ."""
        self._folder = folder
        self._model = model
        self._whole: dict[str, Tensor] = model.state_dict()
        self.unexpected: list[str] = []
        mapping = dict(key_mapping) if key_mapping else None
        transforms = get_model_conversion_mapping(model, mapping)
        self._recipe_by_name: dict[str, Recipe] = {}
        for recipe in self._recipes(transforms):
            self._add(recipe)
        # The rules that were used; save_pretrained reverts them later.
        used = [each for each in transforms if each.was_used()]
        model._weight_conversions = used  # type: ignore[assignment]  # no submodule of it
        self._last: tuple[Recipe, dict[str, Tensor]] | None = None
        self._alias: dict[str, str] = {}
        # By parameter, and before anything wraps the model, because adapters rename parameters.
        self._names: dict[nn.Parameter, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(param, []).append(name)
        self.missing = sorted(self._whole.keys() - self._recipe_by_name.keys())

    def answer_to(self, module: nn.Module) -> None:
        """Use the fqns of ``module``, which wraps the model, from now on.

        A tied parameter has several names; the folder may have any one of them.  Raises
        ``ValueError`` if one of the model's own parameters is gone.
        """
        answered = set()
        for fqn, param in module.named_parameters(remove_duplicate=False):
            names = self._names.get(param, [])
            there = [name for name in names if name in self._recipe_by_name]
            self._alias[fqn] = (there or names or [""])[0]
            answered.add(param)
        lost = [names[0] for param, names in self._names.items() if param not in answered]
        if lost:
            raise ValueError(
                f"adapt: {', '.join(lost[:4])} of the model are parameters of its no more, so "
                "the folder's values would be lost. Keep the model's own parameters, as "
                "get_peft_model does."
            )

    def has(self, fqn: str) -> bool:
        """Whether the folder has this tensor."""
        return self._alias.get(fqn, fqn) in self._recipe_by_name

    def read_rows(self, fqn: str, rows: Span) -> Tensor:
        """Rows of the tensor, [rows.numel, ...], in the model's dtype; a scalar is one row."""
        name = self._alias.get(fqn, fqn)
        recipe = self._recipe_by_name[name]
        if recipe.converter is None:
            return self._folder.read(recipe.sources[0][1], rows).to(self._whole[name].dtype)
        if not rows.numel:
            return self._whole[name].new_empty((0, *self._whole[name].shape[1:]), device="cpu")
        if recipe.num_stacked is not None:
            return self._stack(recipe, rows)
        if self._last is None or self._last[0] is not recipe:
            self._last = None  # freed before the next is read
            tensors = [self._read_source(recipe, key) for _, key in recipe.sources]
            self._last = recipe, recipe.apply(tensors, self._model)
        whole = self._last[1][name]
        return (whole.reshape(1) if whole.dim() == 0 else whole)[rows.start : rows.stop]

    def read(self, name: str) -> Tensor:
        """The whole tensor, for buffers."""
        shape = self._whole[name].shape
        return self.read_rows(name, Span(0, shape[0] if shape else 1)).reshape(shape)

    def _stack(self, recipe: Recipe, rows: Span) -> Tensor:
        """Rows of a stacked tensor; reads only the tensors that become these rows."""
        sources: list[tuple[str, str]] = []
        for pattern in dict.fromkeys(pattern for pattern, _ in recipe.sources):
            of_pattern = [source for source in recipe.sources if source[0] == pattern]
            sources += of_pattern[rows.start : rows.stop]
        part = Recipe(recipe.converter, recipe.name, tuple(sources))
        tensors = [self._read_source(recipe, key) for _, key in sources]
        return part.apply(tensors, self._model)[recipe.name]

    def _read_source(self, recipe: Recipe, key: str) -> Tensor:
        return self._folder.read(key).to(self._whole[recipe.name].dtype)

    def _recipes(self, transforms: Sequence[Any]) -> list[Recipe]:
        """One recipe per rule and target tensor, as transformers' own loading finds them."""
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        by_pattern = {p: each for each in converters for p in each.source_patterns}
        prefix, whole = self._model.base_model_prefix, self._whole
        sources: dict[str, list[tuple[str, str]]] = {}
        converter_by_name: dict[str, WeightConverter | None] = {}
        for key in self._folder.keys:
            name, pattern = rename_source_key(key, renamings, converters, prefix, whole)
            if name not in whole and key in whole:
                name, pattern = rename_source_key(key, [], [], prefix, whole)
            if name not in whole:
                self.unexpected.append(name)
                continue
            sources.setdefault(name, []).append((pattern or key, key))
            converter_by_name.setdefault(name, by_pattern[pattern] if pattern else None)
        return [
            Recipe(converter_by_name[name], name, tuple(each)) for name, each in sources.items()
        ]

    def _add(self, recipe: Recipe) -> None:
        folder = self._folder
        if recipe.converter is None and len(recipe.sources) > 1:
            raise ValueError(
                f"{folder.folder}: {[key for _, key in recipe.sources]} are all "
                f"{recipe.name!r} of the model. Save the model again with one of them."
            )
        dtype = self._whole[recipe.name].dtype
        for _, key in recipe.sources:
            saved = folder.read(key, Span(0, 0)).dtype
            if saved.is_floating_point != dtype.is_floating_point:
                raise ValueError(
                    f"{folder.folder}: {key} is {saved} but {recipe.name} is {dtype}. Save it "
                    "again in a dtype of that kind, or load with from_pretrained."
                )
        shapes = [
            torch.empty(folder.shape(key), dtype=dtype, device="meta")
            for _, key in recipe.sources
        ]
        for name, made in recipe.apply(shapes, self._model).items():
            if name not in self._whole:
                self.unexpected.append(name)
            elif made.shape != self._whole[name].shape:
                raise ValueError(
                    f"{folder.folder}: {name} has shape {tuple(made.shape)} but the model "
                    f"needs {tuple(self._whole[name].shape)}. Pass the config that it was "
                    "saved with."
                )
            else:
                self._recipe_by_name[name] = recipe
