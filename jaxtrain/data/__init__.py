"""Index streams, sources, collation and the loader. Batches are numpy arrays until they are placed on the device."""
