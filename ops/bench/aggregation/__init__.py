"""Aggregation: the replies of a cohort are folded into their mean."""
