"""What the rest does without: found by name where it is there, imported by nothing.

``shared_host``: ranks of one host read each other's memory (``comm.calls`` looks for it).
``compare``, ``doctor``: commands (``apps.main`` has their names).
"""
