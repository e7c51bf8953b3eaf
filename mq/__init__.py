"""What actors say to each other, and how it travels. Nothing here imports torch."""
