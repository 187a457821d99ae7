"""Compare a torch module with its form in JAX: run the checks (`certifier`), hold what they found (`certificate`)."""
