"""The orchestrator: torch-free; owns samples, time and truth."""
