"""The ``--help`` of ``shardhet train`` and others: groups and choices, keys and values."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardhet.apps.cli.streamed import say
from shardhet.config.compose import CONFIG_NAME, VERSION_BASE, conf_dir

USAGE = """\
[bold]shardhet train key=value ...[/]       train; starts its own ranks
[bold]shardhet train -m key=v1,v2 ...[/]    one run after the other, every combination
[bold]torchrun --nproc-per-node=4 -m shardhet.apps.train key=value ...[/]
                                   the same program, started by torchrun
[bold]srun --ntasks=4 shardhet train key=value ...[/]
                                   ... or by Slurm
"""
REMARKS = """\
precision          BF16, or FP16 for cards without bfloat16 (scales the loss): gathered
                   parameters and activations take two bytes; stored ones stay in float32
fp16_accumulation  with FP16: sum in float16, too. GeForce cards then multiply twice as fast,
                   but sums keep 11 bits instead of 24: K terms are off by sqrt(K) / 2^11
hang_timeout_s     end the run if a rank makes no progress for so long while others wait for
                   it; ten times as long before the first step, while torch compiles, and
                   while checkpoints are written. 0 or null: never
stop_on_signal.file
                   if this file appears, on Ctrl-C, or if any rank gets SIGTERM or SIGUSR1:
                   finish the step, write a checkpoint, and end; a second Ctrl-C ends at once
resume             a run's folder: go on with it, by its configuration and what is given here
replicas.every     keep the state on the nodes, each rank's rows on two of them: resume=auto
                   then loses no step if one node is lost
rebalance          true: if a device stays slower than plan.measured says, plan again and move
                   parameters and optimizer states without a restart. false: only report it
on_oom             REPLAN: if a rank is out of memory, lower its device's budget, plan again and
                   go on from the newest checkpoint or replica. STOP: the run fails
guard.on_bad_step  STOP, SKIP or ROLL_BACK if a loss or gradient norm is not finite, or a spike
"""
FLAGS = """\
--cfg job          show the configuration and stop
--config-dir DIR   your own files, laid out like conf/, searched first
--hydra-help       everything else that hydra can do\
"""


def show_help(
    overrides: Sequence[str],
    own_dir: Path | None = None,
    *,
    usage: str = USAGE,
    config_name: str = CONFIG_NAME,
    groups: Sequence[str] | None = None,
    remarks: str = REMARKS,
) -> None:
    """Print the help for all groups or some, with the values that result from ``overrides``.

    Choices in ``own_dir``, the user's folder, are listed among those of conf/.
    """
    with initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE):
        cfg = compose(config_name, list(overrides))  # raises before anything is printed
    console = Console(highlight=False)
    console.print(usage)
    console.print("Choose one of each group, as in model=small:\n")
    found = choices_by_group(conf_dir(), own_dir)
    console.print(choices_table({g: found[g] for g in found if groups is None or g in groups}))
    console.print("\nChange any value, as in optim.lr=1e-3. The values now:\n")
    say(console, indented(OmegaConf.to_yaml(cfg)))
    say(console, remarks)
    console.print(FLAGS, markup=False)


def indented(text: str) -> str:
    """The text with every line indented."""
    return "".join(f"  {line}\n" for line in text.splitlines())


def choices_table(groups: Mapping[str, Mapping[str, str]]) -> Table:
    """The choices of each group and what they are for."""
    table = Table(box=None, show_header=False, padding=(0, 1))
    for group, choices in groups.items():
        for i, (choice, purpose) in enumerate(choices.items()):
            table.add_row(f"  {group}" if i == 0 else "", choice, escape(purpose))
    return table


def choices_by_group(folder: Path, own_dir: Path | None = None) -> dict[str, dict[str, str]]:
    """The files of each group of ``folder``, each with its first comment line.

    A file in ``own_dir`` replaces one of the same name.
    """
    folders = [folder] if own_dir is None else [folder, own_dir]
    return {
        group: {
            path.stem: _purpose(path.read_text(encoding="utf-8"))
            for path in sorted(
                (path for each in folders for path in (each / group).glob("*.yaml")),
                key=lambda path: path.stem,  # stable: own files come last and win
            )
        }
        for group in sorted(path.name for path in folder.iterdir() if path.is_dir())
    }


def _purpose(text: str) -> str:
    comments = [line[1:].strip() for line in text.splitlines() if line.startswith("#")]
    return next((line for line in comments if not line.startswith("@")), "")
