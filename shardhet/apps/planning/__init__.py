"""What ``shardhet plan`` and ``simulate`` read and show."""
