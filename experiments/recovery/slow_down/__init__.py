"""A device that becomes half as fast: how soon is there a new plan, and how good is it?"""
