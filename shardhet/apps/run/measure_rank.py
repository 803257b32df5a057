"""One rank of a measurement.

    python -m shardhet.apps.run.measure_rank FOLDER

is what ``shardhet measure`` starts once per device.
"""

import sys
from pathlib import Path

from shardhet.apps.launch.crash import RankConsole
from shardhet.apps.launch.joining import announced_device, joined
from shardhet.apps.launch.rank_env import RankEnv
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.apps.run.measure_report import Progress, show_measurement
from shardhet.apps.run.model_to_measure import model_to_measure
from shardhet.comm.liveness.ending import end_now
from shardhet.config.measure import MeasureConf
from shardhet.config.train import Precision
from shardhet.profiler.measure import MeasuringEffort, measure


def main() -> None:
    """Measure as one of the ranks that were launched for the folder."""
    env = RankEnv.from_environment()
    assert env is not None, "the rank is started by shardhet measure"
    folder = RunFolder(Path(sys.argv[1]))
    conf = MeasureConf.load(folder.start_config_path)
    try:
        measure_as_rank(conf, folder, env)
    except Exception:
        # The launcher shows the root cause; this rank's traceback is in its log.
        end_now(1)


def measure_as_rank(conf: MeasureConf, folder: RunFolder, env: RankEnv) -> None:
    """Run this rank's part, from process group to the files that the first rank writes."""
    with joined(
        conf.cluster,
        folder,
        env,
        transport=conf.transport,
        # Ranks that share a host take turns, each for a part of the time limit.
        hang_timeout_s=conf.hang_timeout_s and max(conf.hang_timeout_s, 3 * conf.time_limit_s),
        needs_bfloat16=conf.precision is Precision.BF16,
        fp16_accumulation=conf.fp16_accumulation,
    ) as device:
        console = RankConsole(quiet=env.rank != 0)
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


if __name__ == "__main__":
    main()
