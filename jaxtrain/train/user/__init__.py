"""The user's own parts of a run: task, loss, optimizer, schedule, metrics."""
