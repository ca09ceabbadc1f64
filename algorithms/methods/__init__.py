"""One file per federated method."""
