"""The scheduler: who runs in the next step, on which KV blocks."""
