"""Write safetensors files whose tensors arrive one unit after the other."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

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
