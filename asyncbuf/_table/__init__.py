"""Storage, writer, sampler and generator as one, and the history of what happens to them."""
