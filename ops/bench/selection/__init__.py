"""The selection of replay samples: how good the choices are, and our solver beside cvxpy."""
