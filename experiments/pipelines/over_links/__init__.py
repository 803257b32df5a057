"""Pipelines over emulated slow links: predicted and run; see README.md."""
