"""The critic: a token-value HTTP service that is also a train group."""
