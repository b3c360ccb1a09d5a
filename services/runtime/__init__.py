"""How a process lives and dies: lifecycle, logs, metrics, durable files. No torch."""
