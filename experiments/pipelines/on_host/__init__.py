"""What do stages gain that may keep inputs of units, and optimizers, on their hosts?"""
