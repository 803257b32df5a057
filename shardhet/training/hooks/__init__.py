"""What goes on beside training, alike in any loop."""
