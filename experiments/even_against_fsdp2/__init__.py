"""With nothing uneven, is HetFSDP as good as what stock PyTorch offers?"""
