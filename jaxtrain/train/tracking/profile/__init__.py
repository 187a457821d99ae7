"""Profile a few steps: a trace, and a table of where their time went."""
