"""The fleet: how fast it attaches and answers, and how much memory it takes."""
