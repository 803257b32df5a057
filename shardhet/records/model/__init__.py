"""What the units of a model hold and cost."""
