"""The planning problem: what is asked, and what a solution is."""
