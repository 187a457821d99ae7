"""Training and evaluation scripts of the five originals' kind, of which only the import lines name this package."""
