"""What each device may do, with seconds and bytes."""
