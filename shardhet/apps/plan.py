"""``shardhet plan``: finds the best plan for a cluster and a model, and what limits it."""

from collections.abc import Sequence

from shardhet.apps.cli.streamed import WideConsole, refusing, say
from shardhet.apps.planning.heading import heading
from shardhet.apps.planning.inputs import CommandSpec, load, read_request
from shardhet.config.checks import check_folder_output, check_outputs
from shardhet.config.planning import PlannerConf

SPEC = CommandSpec(
    command="shardhet plan",
    config_name="planner",
    usage="""\
shardhet plan key=value ...

  shardhet plan cards='4090+A6000 | 3090x2' network=10GbE model=llama_1b
  shardhet plan model=llama_1b         for the cards of this machine
  shardhet plan cluster=my_cluster.yaml model=gpt_1_3b out=plan.json picture=plan.png
  shardhet plan measured=FOLDER        the three files that shardhet measure has written
  shardhet plan limits.0.memory_gib=8 limits.3.batch=0 'equal=[[1,2]]'
  shardhet plan leave_out=auto         without the devices that only slow it down
  shardhet plan max_stages=3           a pipeline of groups of devices, where that is faster""",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan and show; the exit status is 2 if the input is wrong, and 1 if no plan exists.

    What is planned for is said before the search is imported.
    """
    request = read_request(SPEC, arguments or [])
    if request is None:
        return
    # Of a ConfigError, or files that do not match.
    with refusing("\nNothing was planned."):
        conf, inputs = load(SPEC, request, PlannerConf)
        constraints = conf.to_constraints(inputs.scenario.cluster.devices)
        check_outputs(out=conf.out, picture=conf.picture)
        check_folder_output("scenario_out", conf.scenario_out)
        console = WideConsole()
        say(console, *heading(conf, inputs))
        from shardhet.apps.planning.answering import answer

        answer(conf, inputs, constraints, console)
