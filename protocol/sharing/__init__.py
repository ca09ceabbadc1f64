"""Connections that several peers share: bundles of messages, and both ends of such a connection."""
