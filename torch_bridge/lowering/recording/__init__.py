"""Record a torch module as a graph of operators: torch.export, and what it needs to see all of the module's code."""
