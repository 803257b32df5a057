"""Faults put into running ranks: is the culprit named, and how soon does the run end?"""
