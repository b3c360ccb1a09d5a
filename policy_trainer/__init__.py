"""The policy: a train group that publishes weights."""
