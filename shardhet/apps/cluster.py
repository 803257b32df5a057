"""``shardhet cluster``: writes the description of these cards, to plan for them."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from shardhet.apps.cli.streamed import refusing, say
from shardhet.apps.launch.rank_env import RankEnv
from shardhet.config.checks import check_outputs

USAGE = """\
shardhet cluster key=value ...

  shardhet cluster out=cards.yaml                    this host's cards
  torchrun --nnodes=2 --nproc-per-node=4 ... -m shardhet.apps.cluster out=cards.yaml

Without out= it is printed. shardhet plan cluster=cards.yaml takes it."""
HEADING = """\
# What driver and system say. NVLink is not looked for: where it joins the cards of a host,
# write link: NVLink 3 (or 1 to 5) there.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Describe and write; the exit status is 2 if nothing can be described."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        say(Console(highlight=False), USAGE)
        return
    errors = Console(stderr=True, highlight=False)
    with refusing("\nNothing was written."):
        out = _out_of(given)
        check_outputs(out=out)
        document = _of_ranks(RankEnv.from_environment())
    if document is None:  # another rank's
        return
    text = HEADING + yaml.safe_dump(document, sort_keys=False)
    if "..." in text:
        unknown = "not every card is known. Fill in what stands as ... from its data sheet."
        say(errors, f"kinds: {unknown}")
    if out is None:
        sys.stdout.write(text)
        return
    Path(out).write_text(text, encoding="utf-8")
    say(errors, f"written to {out}: shardhet plan cluster={out} ...")


def _out_of(given: Sequence[str]) -> str | None:
    """The value of ``out=``, which is the only key."""
    out = None
    for each in given:
        key, _, out = each.partition("=")
        if key != "out" or not out:
            raise ValueError(f"{each}: the only key is out. Write out=cards.yaml, or nothing.")
    return out


def _of_ranks(env: RankEnv | None) -> dict[str, Any] | None:
    """The description of all ranks' cards; None on ranks above zero."""
    import torch.distributed as dist

    from shardhet.profiler.here import card_of_each_rank, cards_here, document_of

    if env is None:
        return document_of(cards_here())
    env.publish()
    dist.init_process_group("gloo")
    found = card_of_each_rank(env.local_rank)
    dist.destroy_process_group()
    return document_of(found) if env.rank == 0 else None


if __name__ == "__main__":
    main()
