"""A unit's forward and backward, microbatch by microbatch."""
