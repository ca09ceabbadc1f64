"""What trackers of experiments are told of a run: TensorBoard, MLflow, Weights & Biases, or a user's own."""
