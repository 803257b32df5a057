"""What do the trainer, its display, metrics and data cost?"""
