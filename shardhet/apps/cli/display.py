"""What rank zero shows of a run: a live table on a terminal, plain lines anywhere else."""

from collections import deque
from collections.abc import Sequence
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from shardhet.apps.cli.quantities import of_budget
from shardhet.apps.cli.streamed import figures_table
from shardhet.records.cluster import DeviceSpec
from shardhet.records.plan import Plan, RankPlan
from shardhet.training.device_use import DeviceUse
from shardhet.training.trainer import StepMetrics

REFRESHES_PER_S = 2
NUM_STEPS_IN_MEAN = 20  # for the mean step time, which gives throughput and remaining time


class Display:
    """Shows a run in progress.  On a terminal, the table is drawn below the lines."""

    def __init__(
        self,
        plan: Plan,
        devices: Sequence[DeviceSpec],  # as found, in plan order
        *,
        num_steps: int,
        log_every: int,
        console: Console,
    ) -> None:
        self._plan = plan
        self._devices = devices
        self._num_steps = num_steps
        self._log_every = log_every
        self._latest: StepMetrics | None = None
        self._step_times_s: deque[float] = deque(maxlen=NUM_STEPS_IN_MEAN)
        self._drawn_devices: RenderableType = ""
        self.console = console
        self._live = Live(  # which shows nothing where there is no terminal
            console=console,
            refresh_per_second=REFRESHES_PER_S,
            get_renderable=self._draw,
            transient=True,
        )

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._draw_devices(())
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show_step(self, metrics: StepMetrics) -> None:
        """Print a line every ``log_every`` steps; the live table shows every step."""
        self._latest = metrics
        self._step_times_s.append(metrics.step_time_s)
        if metrics.step % self._log_every == 0 or metrics.step == self._num_steps:
            self.console.print(self._line(metrics), soft_wrap=True)

    def show_devices(self, uses: Sequence[DeviceUse]) -> None:
        """Update the live table, or print one line for all devices."""
        if self.console.is_terminal:
            self._draw_devices(uses)
        else:
            shares = "   ".join(
                f"{i}: {use.busy_share:.0%} busy {use.waiting_share:.0%} waiting"
                for i, use in enumerate(uses)
            )
            self.console.print(f"  devices   {shares}", soft_wrap=True)

    def follow(self, plan: Plan) -> None:
        """Show this plan from now on."""
        self._plan = plan

    def show_remark(self, text: str) -> None:
        """Print something that happens seldom."""
        self.console.print(text, style="bold", markup=False, soft_wrap=True)

    def show_score(self, step: int, name: str, score: float) -> None:
        """Show how well the model does on held-out samples."""
        text = f"step {step:5d}   held-out {score:.3f} {name}"
        self.console.print(text, style="bold", soft_wrap=True)

    def _line(self, metrics: StepMetrics) -> str:
        loss = "none" if metrics.mean_loss is None else f"{metrics.mean_loss:.4f}"
        return (
            f"step {metrics.step:5d} of {self._num_steps}   loss {loss}   "
            f"grad norm {metrics.grad_norm:.2f}   lr {metrics.learning_rate:.2e}   "
            f"{metrics.num_targets / self._step_time_s():,.0f} tokens/s   "
            f"{1000 * self._step_time_s():.0f} ms/step   {self._time_left(metrics.step)} left"
        )

    def _step_time_s(self) -> float:
        return sum(self._step_times_s) / len(self._step_times_s)

    def _time_left(self, step: int) -> str:
        minutes, seconds = divmod(round((self._num_steps - step) * self._step_time_s()), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"

    def _draw_devices(self, uses: Sequence[DeviceUse]) -> None:
        # Built once per report: at every refresh, it would take 2 % of a short step.
        table = device_table(self._plan, self._devices, uses)
        self._drawn_devices = Segments(list(self.console.render(table)))

    def _draw(self) -> RenderableType:
        if self._latest is None:
            return Text("the first step ...")
        return Group(self._drawn_devices, Text(self._line(self._latest)))


def device_table(
    plan: Plan, devices: Sequence[DeviceSpec], uses: Sequence[DeviceUse] = ()
) -> Table:
    """For each device, what it computes and stores and, once known, how busy it is."""
    names = ["busy", "waiting", "peak memory"] if uses else []
    table = figures_table("device", "microbatches", "state", *names)
    for i, (rank, share) in enumerate(zip(plan.ranks, plan.state_shares, strict=True)):
        cells = [device_name(i, devices[i]), microbatches(rank), f"{share:.0%}"]
        if uses:
            cells += [f"{uses[i].busy_share:.0%}", f"{uses[i].waiting_share:.0%}"]
            budget_bytes = devices[i].memory_capacity_bytes or 0
            cells.append(of_budget(uses[i].peak_memory_bytes, budget_bytes))
        table.add_row(*cells)
    return table


def device_name(position: int, device: DeviceSpec) -> str:
    """The name of a device in all output of a run: ``1 Tesla T4``."""
    return f"{position} {device.kind or 'device'}"


def microbatches(rank: RankPlan) -> str:
    """``3 x 8``, ``3 x 8 + 5``, or ``none``."""
    whole = rank.microbatch_sizes.count(max(rank.microbatch_sizes, default=0))
    rest = rank.microbatch_sizes[whole:]
    parts = [f"{whole} x {rank.microbatch_sizes[0]}"] if whole else ["none"]
    return " + ".join([*parts, *map(str, rest)])
