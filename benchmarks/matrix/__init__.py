"""The matrix: workload x ranks x link x system, side by side in one run."""
