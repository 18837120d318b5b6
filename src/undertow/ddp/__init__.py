"""Ways to have a module's gradients averaged: the wrapper, hooks put on from outside, and what torch's wrapper takes."""
