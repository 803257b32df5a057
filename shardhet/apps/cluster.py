"""``shardhet cluster``: writes the description of these cards, to plan for them."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from shardhet.apps.cli.streamed import refusing, say
from shardhet.apps.launch.rank_env import RankEnv
from shardhet.config.checks import check_outputs
from shardhet.records.codec import parse_yaml

USAGE = """\
shardhet cluster key=value ...

  shardhet cluster out=cards.yaml                    this host's cards
  shardhet cluster out=cards.yaml hosts=[a,b]        those of hosts that ssh reaches, too
  torchrun --nnodes=2 --nproc-per-node=4 ... -m shardhet.apps.cluster out=cards.yaml

Without out= it is printed. shardhet plan cluster=cards.yaml takes it."""
HEADING = """\
# What driver and system say. NVLink is not looked for: where it joins the cards of a host,
# write link: NVLink 3 (or 1 to 5) there.
"""
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


@dataclass(kw_only=True)
class DescribedConf:
    """The keys of the command."""

    out: str | None = None
    hosts: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> None:
    """Describe and write; the exit status is 2 if nothing can be described."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        say(Console(highlight=False), USAGE)
        return
    errors = Console(stderr=True, highlight=False)
    with refusing("\nNothing was written."):
        conf = _conf_of(given)
        check_outputs(out=conf.out)
        text = _text_of(conf)
    if text is None:  # another rank's
        return
    if "..." in text:
        unknown = "not every card is known. Fill in what stands as ... from its data sheet."
        say(errors, f"kinds: {unknown}")
    if conf.out is None:
        sys.stdout.write(text)
        return
    Path(conf.out).write_text(text, encoding="utf-8")
    say(errors, f"written to {conf.out}: shardhet plan cluster={conf.out} ...")


def _conf_of(given: Sequence[str]) -> DescribedConf:
    try:
        merged = OmegaConf.merge(
            OmegaConf.structured(DescribedConf), OmegaConf.from_dotlist(list(given))
        )
        conf = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{' '.join(given)}: {reason}. The keys are out and hosts.") from None
    assert isinstance(conf, DescribedConf)
    return conf


def _text_of(conf: DescribedConf) -> str | None:
    """The description as YAML; None on ranks above zero."""
    import yaml

    env = RankEnv.from_environment()
    if conf.hosts and env is not None:
        raise ValueError("hosts: ranks describe their own cards. Drop hosts, or torchrun.")
    document = _of_hosts(conf.hosts) if conf.hosts else _of_ranks(env)
    return None if document is None else HEADING + yaml.safe_dump(document, sort_keys=False)


def _of_ranks(env: RankEnv | None) -> dict[str, Any] | None:
    import torch.distributed as dist

    from shardhet.profiler.here import card_of_each_rank, cards_here, document_of

    if env is None:
        return document_of(cards_here())
    env.publish()
    dist.init_process_group("gloo")
    found = card_of_each_rank(env.local_rank)
    dist.destroy_process_group()
    return document_of(found) if env.rank == 0 else None


def _of_hosts(hosts: Sequence[str]) -> dict[str, Any]:
    """What the same command prints on each of these hosts."""
    from shardhet.profiler.here import joined

    documents = []
    for host in hosts:
        done = subprocess.run(
            [*SSH, host, "shardhet", "cluster"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            reason = " ".join(done.stderr.split()) or f"status {done.returncode}"
            raise ValueError(
                f"hosts: {host}: {reason}. See that `ssh {host} shardhet cluster` works "
                "without a password."
            )
        documents.append(parse_yaml(done.stdout, source=f"hosts: {host}"))
    return joined(documents)


if __name__ == "__main__":
    main()
