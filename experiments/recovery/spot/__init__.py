"""Recorded comings and goings of spot instances, played to two ways of going on."""
