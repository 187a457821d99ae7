"""Index stream, sources, collate, loader. numpy in, numpy out until the last hop to the device."""
