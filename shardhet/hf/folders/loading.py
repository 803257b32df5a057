"""Load a Hugging Face folder as a HetFSDP; no rank ever holds more than its rows."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation
from transformers.utils.loading_report import LoadStateDictInfo

from shardhet.comm.channel import Channel, check_same_on_all_ranks
from shardhet.comm.groups import default_group
from shardhet.fsdp import HetFSDP
from shardhet.hf.folders.adapters import check_adapters, initialise_adapter
from shardhet.hf.folders.reading import PretrainedRows, SafetensorsFolder
from shardhet.records.layout import Span
from shardhet.records.plan import Plan, plan_of

logger = logging.getLogger(__name__)

COMPARED_ROWS_NUMEL = 2**24  # compared at a time, of tied tensors that a folder has twice


def load_pretrained(
    path: str | Path,
    plan: Plan | str | Path | Sequence[int],
    *,
    model_class: Any = None,
    config: PreTrainedConfig | None = None,
    dtype: torch.dtype | str = "auto",
    attn_implementation: str | None = None,
    key_mapping: Mapping[str, str] | None = None,
    adapt: Callable[[PreTrainedModel], nn.Module] | None = None,
    **options: Any,
) -> HetFSDP:
    """Load the model of ``from_pretrained(path)``, each rank with its rows.  Collective.

    Arguments mean the same as in ``from_pretrained``.  Tensors missing from the folder are
    initialised by the model's own rules from ``seed``.  A warning lists them, and also tensors
    that the model does not use.  The model is in evaluation mode.

    Args:
        path: path of a local folder, the same on all ranks.
        plan: as for HetFSDP.
        model_class: a model class or an Auto class; None means the class in the config.
        config: None reads the folder's.
        dtype: dtype of the parameters; "auto" means the config's.
        attn_implementation: as in transformers.
        key_mapping: additional renamings of keys, applied before transformers' own.
        adapt: a function that wraps the model while its parameters are on the meta device:
            ``lambda model: get_peft_model(model, lora_config)``.
        options: options of HetFSDP.
    """
    folder, plan = Path(path), plan_of(plan)
    group = default_group(options.get("group"))
    model = meta_model(
        folder, model_class, config, dtype=dtype, attn_implementation=attn_implementation
    )
    files = SafetensorsFolder(folder)
    if group is not None and group.size() > 1:
        ranks = tuple(range(group.size()))
        channel = Channel(group, ranks, dist.get_rank(group))
        check_same_on_all_ranks(files.describe(), what=f"folder {folder}", channel=channel)
    rows = PretrainedRows(files, model, key_mapping)
    _check_tied_are_equal(model, rows, files)
    _report(model, rows, folder)
    initialise = _Initialiser.of(model, rows)
    module = model if adapt is None else adapt(model)
    rows.answer_to(module)
    initialise.adapters_in(module)
    module.eval()
    return HetFSDP(module, plan, init_fn=initialise, row_source=rows, **options)


def meta_model(
    folder: Path,
    model_class: Any,
    config: PreTrainedConfig | None,
    *,
    dtype: torch.dtype | str,
    attn_implementation: str | None,
) -> PreTrainedModel:
    """The folder's model on the meta device, in the dtypes that ``from_pretrained`` gives."""
    if not folder.is_dir():
        raise ValueError(
            f"{folder}: no such folder. Download it once per host with "
            "huggingface_hub.snapshot_download, and pass what that returns."
        )
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder}: an adapter and not a whole model. Load the model it adapts, with "
            "adapt=lambda model: get_peft_model(model, PeftConfig.from_pretrained(folder))."
        )
    config = config or AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{folder}: the model is quantized, so its weights are not rows of parameters. "
            "Load it with from_pretrained and pass it to HetFSDP."
        )
    found: torch.dtype = _dtype(dtype, config)
    chosen = {"attn_implementation": attn_implementation} if attn_implementation else {}
    model_class = _concrete(model_class or _saved_class(config, folder), config)
    with torch.device("meta"):
        model: PreTrainedModel = model_class._from_config(config, dtype=found, **chosen)
    _keep_dtypes(model, found)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _dtype(dtype: torch.dtype | str, config: PreTrainedConfig) -> Any:
    if not isinstance(dtype, str):
        return dtype
    if dtype == "auto":
        return config.dtype or torch.float32
    return getattr(torch, dtype)


def _saved_class(config: PreTrainedConfig, folder: Path) -> Any:
    names = config.architectures or AutoConfig.from_pretrained(folder).architectures or []
    found = getattr(transformers, names[0], None) if len(names) == 1 else None
    if found is None:
        raise ValueError(
            f"{folder}: config.architectures is {names}, which is not a class of transformers. "
            "Pass model_class, for instance AutoModelForCausalLM."
        )
    return found


def _concrete(model_class: Any, config: PreTrainedConfig) -> Any:
    if hasattr(model_class, "_from_config"):
        return model_class
    try:
        return model_class._model_mapping[type(config)]
    except (AttributeError, KeyError):
        raise ValueError(
            f"model_class: {model_class.__name__} has no model for {type(config).__name__}. "
            "Pass the model's own class."
        ) from None


def _keep_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert to float32 the parameters that the model does not hold in low precision."""
    kept = model._get_dtype_plan(dtype)
    if not kept:
        return
    pattern, *_ = build_glob_alternation(list(kept))
    tied = {id(model.get_parameter(name)) for name in model.all_tied_weights_keys}
    for fqn, param in list(model.named_parameters()):
        if not pattern.search(fqn) or param.dtype == torch.float32:
            continue
        if id(param) in tied:
            raise ValueError(
                f"{fqn}: the model keeps it in float32, and ties it to another. Load with "
                "dtype=torch.float32."
            )
        parent, _, name = fqn.rpartition(".")
        model.get_submodule(parent)._parameters[name] = nn.Parameter(
            param.float(), requires_grad=param.requires_grad
        )


def _check_tied_are_equal(
    model: PreTrainedModel, rows: PretrainedRows, files: SafetensorsFolder
) -> None:
    """Check that tied tensors that the folder has twice are equal."""
    for target, source in model.all_tied_weights_keys.items():
        if not (rows.has(target) and rows.has(source)):
            continue
        shape = model.get_parameter(source).shape
        step = max(1, COMPARED_ROWS_NUMEL // max(1, shape[1:].numel()))
        for start in range(0, shape[0], step):
            span = Span(start, min(start + step, shape[0]))
            if not torch.equal(rows.read_rows(target, span), rows.read_rows(source, span)):
                raise ValueError(
                    f"{files.folder}: {target} and {source} are one tensor by the config but "
                    "differ in the folder. Pass a config with tie_word_embeddings=False."
                )


def _report(model: PreTrainedModel, rows: PretrainedRows, folder: Path) -> None:
    """Warn about tensors that the folder lacks or that the model does not use."""
    params = list(model.named_parameters(remove_duplicate=False))
    ids = {id(param) for name, param in params if rows.has(name)}
    missing = {
        name
        for name in rows.missing
        if id(_find(model, name)) not in ids  # else it is tied to one that is present
    }
    loading_info = LoadStateDictInfo(
        missing_keys=missing,
        unexpected_keys=set(rows.unexpected),
        mismatched_keys=set(),
        conversion_errors={},
        error_msgs=[],
        skipped_pp_keys=set(),
    )
    model._adjust_missing_and_unexpected_keys(loading_info)
    if loading_info.missing_keys:
        logger.warning(
            "%s: lacks %s; initialised anew, to be trained.",
            folder,
            ", ".join(sorted(loading_info.missing_keys)),
        )
    if loading_info.unexpected_keys:
        logger.warning(
            "%s: %s not used by %s.",
            folder,
            ", ".join(sorted(loading_info.unexpected_keys)),
            type(model).__name__,
        )


def _find(model: nn.Module, name: str) -> Tensor:
    parent, _, attribute = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(parent), attribute)
    return tensor


@dataclass(slots=True)
class _Initialiser:
    """The ``init_fn`` of HetFSDP: initialises by the model's own rules what is not read."""

    rows: PretrainedRows
    owners: dict[nn.Module, PreTrainedModel]  # whose rules initialise the module
    fqns: dict[nn.Module, str]
    adapters: dict[nn.Module, Any]  # for a part of an adapter: its layer, and all configs

    @classmethod
    def of(cls, model: PreTrainedModel, rows: PretrainedRows) -> "_Initialiser":
        owners: dict[nn.Module, PreTrainedModel] = {}
        for each in model.modules():  # parents first, so that the innermost owner stays
            if isinstance(each, PreTrainedModel):
                owners |= dict.fromkeys(each.modules(), each)
        fqns = {module: fqn for fqn, module in model.named_modules()}
        for name, param in model.named_parameters(remove_duplicate=False):
            if rows.has(name):
                param._is_hf_initialized = True  # type: ignore[attr-defined]
        return cls(rows, owners, fqns, {})

    def adapters_in(self, module: nn.Module) -> None:
        """Record the layers of adapters, whose parts are initialised together."""
        check_adapters(module)
        for layer in module.modules():
            if hasattr(layer, "adapter_layer_names"):
                own = set(layer.modules()) - self.owners.keys() - {layer}
                configs = getattr(module, "peft_config", {})
                self.adapters |= dict.fromkeys(own, (layer, configs))

    def __call__(self, module: nn.Module) -> None:
        if module in self.adapters:
            initialise_adapter(*self.adapters[module])
            return
        if module not in self.owners:
            raise ValueError(
                f"{type(module).__name__}: it came from adapt() and nothing says how it is "
                "initialised. Use LoRA, or build the model in memory and pass it to HetFSDP."
            )
        names = [name for name, b in module._buffers.items() if b is not None]
        results = [self._initialise(module, names, mark) for mark in (0, 1)]
        unfilled = [n for n in names if not _same(results[0][n], results[1][n])]
        if unfilled:
            raise ValueError(
                f"{self.fqns[module]}: {type(module).__name__} does not initialise its buffers "
                f"{unfilled}. Load it with from_pretrained and pass it to HetFSDP."
            )

    def _initialise(self, module: nn.Module, names: list[str], mark: int) -> dict[str, Tensor]:
        """The buffers, filled by the model's rules and from the folder."""
        for name in names:
            buffer = module._buffers[name]
            assert buffer is not None
            buffer.fill_(mark)
        self.owners[module]._init_weights(module)
        found: dict[str, Tensor] = {}
        for name in names:
            buffer = module._buffers[name]
            assert buffer is not None
            fqn = f"{self.fqns[module]}.{name}".lstrip(".")
            is_persistent = name not in module._non_persistent_buffers_set
            if is_persistent and self.rows.has(fqn):
                buffer.copy_(self.rows.read(fqn))
            found[name] = buffer.clone()
        return found


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(torch.equal(a, b))
