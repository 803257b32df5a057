"""Is the best pipeline found, and is no plan with stages slower than the one without?"""
