"""A profile of a few steps: the trace, and a table of where their time went."""
