"""A sample is computed in pieces of its tokens, by one device in turn or by several."""
