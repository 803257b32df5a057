"""A step event by event, and the timeline of what each device did when."""
