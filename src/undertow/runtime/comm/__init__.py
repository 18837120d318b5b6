"""Process groups of our own, collectives, and what ranks agree on."""
