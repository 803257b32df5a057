"""What is kept of a plan, and how it is followed on several hosts."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from shardhet.apps.cli.streamed import say
from shardhet.pricing.setting import Setting
from shardhet.records.plan import Plan

LAST_PLAN = Path(".shardhet", "last_plan.json")  # where no other place was asked for


def keep_plan(setting: Setting, plan: Plan, path: str | None, console: Console) -> None:
    """Write the plan, with what it holds for, and say what to start."""
    if path is None:
        with suppress(OSError):
            LAST_PLAN.parent.mkdir(exist_ok=True)
        if not os.access(LAST_PLAN.parent, os.W_OK):
            return
        said = [f"The plan is in {LAST_PLAN} until the next one; out=plan.json keeps it."]
    else:
        said = [f"written to {path}", *launch_lines(plan, path)]
    setting.named(plan).save(path or LAST_PLAN)
    say(console, *said)


def launch_lines(plan: Plan, path: str) -> Iterator[str]:
    """What to start on each host, if there are several."""
    num_by_host = Counter(rank.device.host for rank in plan.ranks if rank.device.host)
    if len(num_by_host) < 2:
        return
    hosts_by_num: dict[int, list[str]] = {}
    for host, num in num_by_host.items():
        hosts_by_num.setdefault(num, []).append(host)
    first = next(iter(num_by_host))
    yield f"To train, put {path} on every host and start, with the same other keys:"
    for num, hosts in hosts_by_num.items():
        yield (
            f"  on {', '.join(hosts)}: torchrun --nnodes={len(num_by_host)} "
            f"--nproc-per-node={num} --rdzv-backend=c10d --rdzv-endpoint={first}:29500 "
            f"-m shardhet.apps.train plan=file plan.path={path} ..."
        )
