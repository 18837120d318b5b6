"""Reports and pictures of traces."""
