"""Where models come from: names, folders, GGUF files, the hub. Nothing here imports torch."""
