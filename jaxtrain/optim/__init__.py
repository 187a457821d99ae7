"""Learning-rate schedules, optimizers (gradients -> updates) and ReduceLROnPlateau."""
