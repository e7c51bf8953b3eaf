"""What people touch: LLM and AsyncLLM, the HTTP server, the command line."""
