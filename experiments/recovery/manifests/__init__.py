"""Manifests with other values, signed anew: refused or harmless."""
