"""A watch over all ranks, which ends the run when one of them stands still.

HetFSDP starts it; ``watch_ranks`` changes it or switches it off.  Code that takes long on one
rank while others wait for it, and in which nothing is wrong, goes into
``with may_take_long("...")``.
"""
