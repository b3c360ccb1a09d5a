"""Inference engines behind one HTTP contract: our local engine, vLLM with our extension, and the client for both."""
