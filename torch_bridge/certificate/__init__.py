"""A torch module in torch and in JAX, measured side by side: layers, loss, gradients, updates."""
