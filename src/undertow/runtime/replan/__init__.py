"""The plan in force, and the moves of all ranks to another one."""
