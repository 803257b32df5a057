"""The only place that knows what a step costs, in seconds and bytes."""
