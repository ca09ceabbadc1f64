"""A campaign of random accidents at random moments of runs of random methods."""
