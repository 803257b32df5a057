"""One rank of a measurement.

    python -m shardhet.apps.run.measure_rank FOLDER

is what ``shardhet measure`` starts once per device.
"""

from shardhet.apps.launch.crash import RankConsole
from shardhet.apps.launch.joining import joined, run_as_rank
from shardhet.apps.launch.rank_env import RankEnv
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.apps.run.measure_report import show_measurement
from shardhet.apps.run.model_to_measure import measured_here
from shardhet.config.checks import fields_of
from shardhet.config.compose import load_checked
from shardhet.config.measure import MeasureConf
from shardhet.config.train import Precision
from shardhet.profiler.measure import MeasuringEffort


def main() -> None:
    """Measure as one of the ranks that were launched for the folder."""
    run_as_rank(measure_launched)


def measure_launched(folder: RunFolder, env: RankEnv) -> None:
    """``measure_as_rank`` by the configuration in the folder."""
    measure_as_rank(load_checked(folder.start_config_path, MeasureConf), folder, env)


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
        effort = MeasuringEffort(**fields_of(conf, MeasuringEffort))
        measured = measured_here(conf, effort, env, device, console)
        if env.rank == 0:
            measured.save(folder.path)
        show_measurement(console, measured, folder.path)


if __name__ == "__main__":
    main()
