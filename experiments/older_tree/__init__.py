"""Does this version start and step as fast as an older one?"""
