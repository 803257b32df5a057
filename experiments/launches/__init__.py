"""Does every launch make exactly one complete run folder?"""
