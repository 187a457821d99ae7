"""Report a run folder as one HTML page: read it (`records`), draw charts (`charts`), write the page (`page`)."""
