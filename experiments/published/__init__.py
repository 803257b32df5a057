"""Clusters and models that others have published about: what does each form of plan give?"""
