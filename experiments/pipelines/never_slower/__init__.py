"""Is a plan ever slower because stages, or the memory of hosts, are allowed?"""
