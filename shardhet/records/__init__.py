"""Clusters, workloads, profiles and plans as files, and what follows from them."""
