"""What the trainers of the originals' facades share."""
