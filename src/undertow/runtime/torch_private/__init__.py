"""Everything private of torch, in one place, with a test each."""
