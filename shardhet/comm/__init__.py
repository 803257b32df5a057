"""Communication in plan order: channels, uneven collectives and failure propagation."""
