"""Simulate a step event by event, and record what each device does when."""
