"""Python state outside tensors that recorded code reads, changes or asks for."""
