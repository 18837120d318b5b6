"""All uses of torch's private API, in one place, each with a test."""
