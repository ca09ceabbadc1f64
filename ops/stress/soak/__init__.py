"""The soak: a small fleet under churn for a long time, and whether anything of it grows."""
