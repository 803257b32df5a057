"""Schema of ``model=imported``: a model class of your own, to be measured and planned for."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from shardhet.config.checks import ConfigError, config_errors
from shardhet.config.models import ModelConf, ModelKind
from shardhet.records.workload import Workload

if TYPE_CHECKING:
    from shardhet.profiler.batch import TrainedModel

HOW = "Write package.module:name, importable from this folder"


@dataclass(kw_only=True)
class ImportedConf(ModelConf):
    """A model by the import path of its class, with a function that makes an example batch."""

    kind: ModelKind = ModelKind.IMPORTED
    target: str = MISSING  # "my_model:MyModel", a class or a function that returns the model
    batch: str = MISSING  # "my_model:batch", called without arguments; as plan_for's batch
    arguments: dict[str, Any] = field(default_factory=dict)  # keyword arguments of target
    units: list[str] = field(default_factory=list)  # as HetFSDP's; empty: found by shardhet
    loss_fn: str | None = None  # "my_model:loss", as HetFSDP's, if the model returns logits

    def title(self, choice: str) -> str:
        """The name of the class."""
        return self.target.rpartition(":")[2]

    def to_workload(
        self, *, param_dtype: str, vocab_size: int | None = None, seq_len: int | None = None
    ) -> Workload:
        """The model's workload, counted on tensors without memory."""
        import torch

        from shardhet.profiler.describe import describe_spec
        from shardhet.profiler.model_spec import trace_model

        for key, value in (("vocab_size", vocab_size), ("seq_len", seq_len)):
            if value is not None:
                raise ConfigError(f"{key}: the samples are those of model.batch. Leave it out.")
        model = replace(
            self.trained(),
            param_dtype=getattr(torch, param_dtype),
            reduce_dtype=torch.float32,
        )
        with config_errors("model"):
            return describe_spec(trace_model(model), model)

    def trained(self) -> "TrainedModel":
        """The model on the meta device, and how it is trained."""
        import torch

        from shardhet.models.pretrained import fill_for_times
        from shardhet.profiler.batch import TrainedModel
        from shardhet.profiler.describe import as_example

        with torch.device("meta"):
            module = imported("model.target", self.target)(**self.arguments)
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(
                f"model.target: {self.target} returned {type(module).__name__}, but a model is "
                "needed. Name a subclass of nn.Module, or a function that returns one."
            )
        return TrainedModel(
            module=module,
            batch=as_example(imported("model.batch", self.batch)()),
            units=self.units or None,
            loss_fn=imported("model.loss_fn", self.loss_fn) if self.loss_fn else None,
            init_fn=fill_for_times,
        )


def imported(key: str, path: str) -> Callable[..., Any]:
    """What ``path`` names; ConfigError with ``key`` if there is no such thing."""
    module_name, _, name = path.partition(":")
    if str(Path.cwd()) not in sys.path:  # a console script does not see its own folder
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{key}: {path!r} cannot be imported: {error}. {HOW}.") from None
    if not callable(getattr(found, name, None)):
        raise ConfigError(f"{key}: {module_name} has nothing callable named {name!r}. {HOW}.")
    function: Callable[..., Any] = getattr(found, name)
    return function
