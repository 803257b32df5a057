"""Describe the cost of replicas as text."""

from shardhet.apps.cli.quantities import GIB, MIB, counted, duration
from shardhet.pricing.replicas import NUM_VERSIONS, ReplicaPrice

CHEAP = 0.05  # of the time of a step


def told_price(price: ReplicaPrice, step_s: float, every: int) -> str:
    """What a replica every so many steps takes of memory and time, and how to have it cheap."""
    least, most = price.wait_s(step_s, every) / step_s, price.most_s(step_s, every) / step_s
    parts = [
        f"Replicas every {'step' if every == 1 else counted(every, 'step')}: {_sizes(price)} "
        f"for {NUM_VERSIONS} versions, in host memory or on disk. For each, a "
        f"step waits {duration(price.pause_s)} for copies to host memory; they are written "
        f"{duration(price.write_s)} later"
    ]
    if price.num_nodes == 1:
        parts.append(f". Steps are {least:.1%} slower. One node: its loss takes them along.")
    elif price.send_s is None:
        parts.append(
            f", and on other nodes after a time that is not known, because the cluster's "
            f"between_nodes is not stated. Steps are at least {least:.1%} slower."
        )
    else:
        parts.append(
            f", and on other nodes after {duration(price.send_s)} more. Steps are {least:.1%} "
            f"slower if links have room for that, {most:.1%} if they have none."
        )
    if most > CHEAP and price.send_s is not None:
        enough = price.least_every(step_s, CHEAP)
        parts.append(f" With replicas.every={enough} it is {CHEAP:.0%} at most.")
    return "".join(parts)


def _sizes(price: ReplicaPrice) -> str:
    least, most = min(price.bytes_by_node), max(price.bytes_by_node)
    size = _size(most) if _size(least) == _size(most) else f"{_size(least)} to {_size(most)}"
    where = "the node" if price.num_nodes == 1 else f"each of {price.num_nodes} nodes"
    return f"{size} on {where}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:,.0f} MiB"
