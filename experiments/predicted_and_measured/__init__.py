"""Does a step take as long as the simulator says?"""
