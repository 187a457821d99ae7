"""State that Python code keeps beside the tensors while it is recorded: what it reads, changes and is told."""
