"""Random graphs of units: each case is exact, or refused by name on every rank."""
