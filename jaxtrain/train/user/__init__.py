"""A run's parts that the user hands over: task, loss, optimizer, schedule, metrics."""
