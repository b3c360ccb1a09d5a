"""What two or more processes share; each sub-package is one idea, and none imports a process."""
