"""Do models that know nothing of HetFSDP train under uneven plans as one process does?"""
