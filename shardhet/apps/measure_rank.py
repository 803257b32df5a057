"""One rank of a measurement.

    python -m shardhet.apps.measure_rank FOLDER

is what ``shardhet measure`` starts once per device.
"""

import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from shardhet.apps.common.crash import RankConsole
from shardhet.apps.common.joining import announced_device, joined
from shardhet.apps.common.rank_env import RankEnv
from shardhet.apps.common.run_folder import RunFolder
from shardhet.apps.common.task import DTYPE_BY_PRECISION, make_module
from shardhet.apps.measure_report import Progress, show_measurement
from shardhet.config.measure import MeasureConf
from shardhet.config.models import DataConf, TextConf
from shardhet.config.pretrained import HfConf
from shardhet.config.train import Precision
from shardhet.models.decoder import Decoder
from shardhet.models.encoder import MaskedLm
from shardhet.models.pretrained import LanguageModel
from shardhet.profiler.batch import ExampleBatch
from shardhet.profiler.measure import MeasuringEffort, measure
from shardhet.profiler.unit_runner import TrainedModel
from shardhet.training.samples import DIGIT_SIDE, NUM_DIGIT_CLASSES

NUM_EXAMPLES = 32


def main() -> None:
    """Measure as one of the ranks that were launched for the folder."""
    env = RankEnv.from_environment()
    assert env is not None, "the rank is started by shardhet measure"
    folder = RunFolder(Path(sys.argv[1]))
    conf = MeasureConf.load(folder.config_path)
    with suppress(KeyboardInterrupt):  # the launcher reports it
        try:
            measure_as_rank(conf, folder, env)
        except Exception:
            # The launcher shows the root cause; this rank's traceback is in its log.
            raise SystemExit(1) from None


def measure_as_rank(conf: MeasureConf, folder: RunFolder, env: RankEnv) -> None:
    """Run this rank's part, from process group to the files that the first rank writes."""
    with joined(
        conf.cluster,
        folder,
        env,
        transport=conf.transport,
        # Ranks that share a host take turns, each for a part of the time limit.
        hang_timeout_s=conf.hang_timeout_s and max(conf.hang_timeout_s, conf.time_limit_s),
        needs_bfloat16=conf.precision is Precision.BF16,
    ) as device:
        console = RankConsole(quiet=env.rank != 0, highlight=False)
        with Progress(console) as progress:
            measured = measure(
                model_to_measure(conf),
                device=device,
                device_spec=announced_device(conf.cluster, env, device),
                emulated=conf.cluster.emulated_device(env.rank),
                optimizer=conf.optim.to_record(),
                effort=MeasuringEffort(
                    max_microbatch_size=conf.max_microbatch_size,
                    num_repeats=conf.num_repeats,
                    time_limit_s=conf.time_limit_s,
                ),
                on_progress=progress.show,
            )
        if env.rank == 0:
            measured.save(folder.path)
        show_measurement(console, measured, folder.path)


def model_to_measure(conf: MeasureConf) -> TrainedModel:
    """The model that would be trained, without values, and a batch of random samples."""
    param_dtype = torch.bfloat16 if conf.precision is Precision.BF16 else None
    if isinstance(conf.model, HfConf):
        assert isinstance(conf.data, TextConf)
        folder = conf.model.folder()
        module = folder.on_meta(
            dtype=DTYPE_BY_PRECISION[conf.precision], lora=conf.model.adapters()
        )
        return LanguageModel.of(module, folder.objective).trained(
            module,
            vocab_size=folder.vocab_size,
            seq_len=conf.data.seq_len,
            param_dtype=param_dtype,
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
    """Samples of the right shape: tokens, or images with their classes."""
    random = torch.Generator().manual_seed(seed)
    if not isinstance(data, TextConf):
        images = torch.rand(NUM_EXAMPLES, DIGIT_SIDE, DIGIT_SIDE, generator=random)
        labels = torch.randint(NUM_DIGIT_CLASSES, (NUM_EXAMPLES,), generator=random)
        return ExampleBatch(args=(images, labels))
    assert isinstance(module, Decoder | MaskedLm)
    embedding = module.embedding
    rows = embedding.weight if isinstance(module, Decoder) else embedding.token
    assert isinstance(rows, torch.Tensor)
    tokens = torch.randint(rows.shape[0], (NUM_EXAMPLES, data.seq_len), generator=random)
    return ExampleBatch(args=(tokens, tokens))


if __name__ == "__main__":
    main()
