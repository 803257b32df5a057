"""Adapters of quantized models under a plan."""
