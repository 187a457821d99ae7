"""Capture torch code as ATen graphs, and compute them with JAX.

Three stages, each printable (`JAXTRAIN_LOG=guards,graph,jaxpr`): TorchDynamo watches the Python code and guards what it
has seen; AOTAutograd makes its graph functional, with torch's own backward pass in it; JAX computes the operators.

torch_api: the one file that uses torch's private capture API. aten_program: an ATen graph as a function of arrays.
joint: forward and backward of a loss in one graph, for compiled steps. backend: `torch.compile(backend="jaxtrain")`.
"""
