"""Ways into training frameworks, one module for each; importing a module imports its framework."""
