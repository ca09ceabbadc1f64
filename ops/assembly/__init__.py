"""An experiment put together: data, model, method, partition and stream become a plan."""
