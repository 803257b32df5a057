"""Who gets which sample: batches of a dataset, dealt out to the ranks of a plan."""
