"""How does a layer's time go on beyond the sizes that were measured?"""
