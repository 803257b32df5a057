"""The planner of pipelines whose stages are groups of unlike devices."""
