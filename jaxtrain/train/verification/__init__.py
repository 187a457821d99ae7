"""Compare a torch module with its JAX version: run the checks (`certifier`), and store the results (`certificate`)."""
