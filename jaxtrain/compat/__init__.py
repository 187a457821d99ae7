"""Parts that the trainers of the originals' facades share."""
