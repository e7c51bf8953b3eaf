"""Text in and text out: tokenizers, chat templates, detokenisation, stop strings, events."""
