"""How far are times from specifications off, on blocks that others have timed?"""
