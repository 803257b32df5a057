"""Code that several programs share."""
