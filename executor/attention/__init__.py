"""Attention backends over the paged KV cache, found through the registry here."""
