"""What the papers measure: accuracy over tasks, and forgetting."""
