"""A run folder as one page of HTML: read it (`records`), draw it (`charts`), write it (`page`)."""
