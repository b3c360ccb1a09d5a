"""The planner, the local supervisor and the command line. No torch."""
