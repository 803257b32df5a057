"""Is the plan the best one, and how long does it take to find?"""
