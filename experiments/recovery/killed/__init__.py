"""Runs that lose their launcher, their agent or a rank."""
