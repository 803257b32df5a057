"""Muon on unlike devices, whose matrices are each whole on one of them."""
