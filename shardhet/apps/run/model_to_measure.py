"""Build the model of a configuration for the profiler."""

from dataclasses import replace

import torch
from torch import nn

from shardhet.apps.run.task import (
    DTYPE_BY_PRECISION,
    PARAM_DTYPE_BY_PRECISION,
    make_module,
)
from shardhet.config.imported import ImportedConf
from shardhet.config.measure import MeasureConf
from shardhet.config.models import DataConf
from shardhet.config.pretrained import HfConf
from shardhet.config.train import Precision, TrainConf
from shardhet.models.decoder import Decoder
from shardhet.models.pretrained import LanguageModel
from shardhet.profiler.batch import ExampleBatch, TrainedModel

NUM_EXAMPLES = 32


def model_to_measure(conf: MeasureConf | TrainConf) -> TrainedModel:
    """The model that would be trained, without values, and a batch of random samples."""
    param_dtype = PARAM_DTYPE_BY_PRECISION.get(conf.precision)
    if isinstance(conf.model, ImportedConf):
        model = replace(conf.model.trained(), param_dtype=param_dtype, seed=conf.seed)
        if conf.precision is Precision.FP64:
            model.module.double()
        return model
    if isinstance(conf.model, HfConf):
        folder = conf.model.folder()
        module = folder.on_meta(
            dtype=DTYPE_BY_PRECISION[conf.precision], lora=conf.model.adapters(param_dtype)
        )
        return LanguageModel(folder.objective).trained(
            module,
            vocab_size=folder.vocab_size,
            seq_len=conf.data.seq_len,
            param_dtype=param_dtype,
            reduce_dtype=DTYPE_BY_PRECISION[conf.precision],
            seed=conf.seed,
        )
    module = make_module(conf.model, conf.data, conf.precision)
    return TrainedModel(
        module=module,
        batch=random_batch(module, conf.data, seed=conf.seed),
        param_dtype=param_dtype,
        seed=conf.seed,
    )


def random_batch(module: nn.Module, data: DataConf, *, seed: int) -> ExampleBatch:
    """Random tokens of the right shape."""
    random = torch.Generator().manual_seed(seed)
    assert isinstance(module, Decoder)
    num_kinds = module.embedding.weight.shape[0]
    tokens = torch.randint(num_kinds, (NUM_EXAMPLES, data.seq_len), generator=random)
    return ExampleBatch(args=(tokens, tokens))
