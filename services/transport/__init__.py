"""Bytes in motion: grid sender and receiver, the scoring client, deadlines. No torch."""
