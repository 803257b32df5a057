"""Build the model of a configuration for the profiler, and measure it."""

from dataclasses import replace

import torch
from rich.console import Console
from torch import nn

from shardhet.apps.cli.streamed import say
from shardhet.apps.launch.joining import announced_device
from shardhet.apps.launch.rank_env import RankEnv
from shardhet.apps.run.task import (
    DTYPE_BY_PRECISION,
    PARAM_DTYPE_BY_PRECISION,
    make_module,
)
from shardhet.config.imported import ImportedConf
from shardhet.config.measure import MeasureConf
from shardhet.config.models import DataConf, HfConf
from shardhet.config.train import Precision, TrainConf
from shardhet.models.decoder import Decoder
from shardhet.models.pretrained import NUM_EXAMPLES
from shardhet.profiler.batch import ExampleBatch, TrainedModel
from shardhet.profiler.measure import Measurement, MeasuringEffort, measure


def model_to_measure(conf: MeasureConf | TrainConf) -> TrainedModel:
    """The model that would be trained, without values, and a batch of random samples."""
    param_dtype = PARAM_DTYPE_BY_PRECISION.get(conf.precision)
    if isinstance(conf.model, ImportedConf):
        model = replace(conf.model.trained(), param_dtype=param_dtype, seed=conf.seed)
        if conf.precision is Precision.FP64:
            model.module.double()
        return model
    if isinstance(conf.model, HfConf):
        return conf.model.trained(
            dtype=DTYPE_BY_PRECISION[conf.precision],
            param_dtype=param_dtype,
            seq_len=conf.data.seq_len,
            seed=conf.seed,
        )
    module = make_module(conf.model, conf.data, conf.precision)
    return TrainedModel(
        module=module,
        batch=random_batch(module, conf.data, seed=conf.seed),
        param_dtype=param_dtype,
        seed=conf.seed,
    )


def measured_here(
    conf: MeasureConf | TrainConf,
    effort: MeasuringEffort,
    env: RankEnv,
    device: torch.device,
    console: Console,
) -> Measurement:
    """What the devices of all ranks do with the model, shown while it is measured.

    Collective.
    """
    return measure(
        model_to_measure(conf),
        device=device,
        device_spec=announced_device(conf.cluster, env, device),
        emulated=conf.cluster.emulated_device(env.rank),
        optimizer=conf.optim.to_record(),
        effort=effort,
        on_progress=lambda text, part: say(console, f"{part:4.0%}  {text}"),
    )


def random_batch(module: nn.Module, data: DataConf, *, seed: int) -> ExampleBatch:
    """Random tokens of the right shape."""
    random = torch.Generator().manual_seed(seed)
    assert isinstance(module, Decoder)
    num_kinds = module.embedding.weight.shape[0]
    tokens = torch.randint(num_kinds, (NUM_EXAMPLES, data.seq_len), generator=random)
    return ExampleBatch(args=(tokens, tokens))
