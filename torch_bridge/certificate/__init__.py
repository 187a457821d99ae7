"""Compare a torch module in torch and in JAX side by side: layers, loss, gradients, updates."""
