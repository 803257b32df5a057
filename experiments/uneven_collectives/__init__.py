"""Do uneven shards cost anything on the wire?"""
