"""From draws to batches: the queue, gathering, transforms, and the hand-over."""
