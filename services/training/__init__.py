"""The train group that policy and critic both are: command loop, preflight, vote, optimizer, control routes."""
