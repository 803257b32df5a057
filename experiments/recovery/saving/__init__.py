"""What checkpoints cost: throughput while they are written, and beside the disk's own speed."""
