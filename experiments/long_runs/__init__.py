"""Does a process grow from step to step?"""
