"""Schedules, optimizer chain, plateau: step -> value, gradients -> updates."""
