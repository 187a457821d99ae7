"""Which run a folder holds, and where a run goes on from."""
