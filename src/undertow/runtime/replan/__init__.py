"""Which plan is in force, and how all ranks move to another one."""
