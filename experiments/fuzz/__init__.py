"""Is any module exact, or refused by name?"""
