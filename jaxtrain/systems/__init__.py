"""The five systems and digits: one folder each, importing nothing of `train/` nor of each other."""
