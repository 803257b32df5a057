"""Runs that are killed or told to end: do they go on where they were?"""
