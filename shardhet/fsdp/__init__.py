"""HetFSDP: exact fully sharded training with uneven batches and uneven shards."""

from shardhet.fsdp.module import HetFSDP

__all__ = ["HetFSDP"]
